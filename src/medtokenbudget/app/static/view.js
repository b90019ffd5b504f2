// What one selector's answer means at one budget. Pure: no page, no canvas; drawing and text both read it.

/** The answer of `selector` at stop `index`: K, kept patches, retention, ceiling, class. */
export function at(answer, selector, index) {
  const k = selector.k[index];
  const n = answer.n;
  const kept = selector.order ? new Uint8Array(n) : null;
  if (kept) for (let i = 0; i < k; i += 1) kept[selector.order[i]] = 1;
  const probabilities = selector.probabilities[index];
  const top = probabilities.indexOf(Math.max(...probabilities));
  const lesion = answer.lesion && answer.lesion.length ? answer.lesion.length : null;
  const retention = selector.retention ? selector.retention[index] : null;
  const ceiling = selector.ceiling ? selector.ceiling[index] : null;
  return {
    k,
    n,
    kept,
    groups: selector.groups ? selector.groups[index] : null,
    probabilities,
    top,
    label: answer.classes[top],
    retention,
    ceiling,
    ofCeiling: retention === null ? null : retention / ceiling,
    lost: retention === null ? null : Math.round(lesion * (1 - retention)),
    lesion,
  };
}

/** 1 where a patch is lesion, or null without a mask. */
export function lesionMap(answer) {
  if (!answer.lesion) return null;
  const map = new Uint8Array(answer.n);
  for (const patch of answer.lesion) map[patch] = 1;
  return map;
}

/** Per cent without false precision: 93 %, 0.4 %. */
export function percent(value) {
  const points = 100 * value;
  if (points > 0 && points < 0.95) return points < 0.05 ? "<0.1 %" : `${points.toFixed(1)} %`;
  if (points > 99 && points < 100) return `${(Math.floor(points * 10) / 10).toFixed(1)} %`;
  return `${Math.round(points)} %`;
}

const ABOUT = {
  lats: "Learned score of each patch: embedding, attention, norm and local contrast.",
  "no-pruning": "Keeps every patch at every budget: the reference.",
  random: "Draws patches without looking.",
  norm: "Largest patch embeddings first.",
  tome: "Merges similar patches into K tokens; no patch is kept as it was, so there is no retention.",
  "attention-entropy": "Patches whose attention is most focused first.",
  "class-attention": "Patches that the class token attends to first.",
  "local-contrast": "Patches that differ most from their neighbours first.",
  center: "Nearest to the image's center first: no model at all.",
  darkness: "Darkest patches first: no model at all.",
  oracle: "Reads the mask: lesion first. A bound, not a method.",
};

export function about(name) {
  const [base, variant] = name.split(":");
  const text = ABOUT[base] ?? "";
  return variant ? `${text} Variant: ${variant}.`.trim() : text;
}

/** A sentence or two for people who listen rather than look. */
export function sentence(name, view) {
  const parts = [`${name}: ${view.k} of ${view.n} ${view.kept ? "patches kept" : "tokens"}`];
  if (view.retention !== null) parts.push(`retention ${percent(view.retention)}, ceiling ${percent(view.ceiling)}`);
  parts.push(`${view.label} ${percent(view.probabilities[view.top])}`);
  return `${parts.join("; ")}.`;
}
