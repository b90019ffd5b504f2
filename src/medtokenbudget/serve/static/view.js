// One method at one budget: the numbers that the drawing and the text show. Pure functions.

/** The result of `selector` at budget `index` of `answer`. The retention was measured by the service. */
export function at(answer, selector, index) {
  const k = selector.k[index];
  const n = answer.n;
  // A sampler keeps patches as they are, but others at every budget: those that went to a token.
  const sampled = selector.kind === "sampler" ? selector.groups[index] : null;
  let kept = null;
  if (selector.order) {
    kept = new Uint8Array(n);
    for (let i = 0; i < k; i += 1) kept[selector.order[i]] = 1;
  } else if (sampled) kept = Uint8Array.from(sampled, (token) => (token < 0 ? 0 : 1));
  // A router without a head predicts no class.
  const probabilities = selector.probabilities ? selector.probabilities[index] : [];
  const top = probabilities.length ? probabilities.indexOf(Math.max(...probabilities)) : null;
  const measured = Boolean(selector.retention);
  return {
    k,
    n,
    kept,
    groups: selector.groups && !sampled ? selector.groups[index] : null,
    probabilities,
    top,
    label: top === null ? null : answer.classes[top],
    retention: measured ? selector.retention[index] : null,
    ceiling: measured ? selector.ceiling[index] : null,
    ofCeiling: measured ? selector.retention_of_ceiling[index] : null,
    lesion: measured ? answer.lesion.length : null,
    lost: measured ? answer.lesion.filter((patch) => !kept[patch]).length : null,
  };
}

/** Expected retention of K randomly chosen patches at each budget, with the K of `selector`. */
export const expectedOfRandom = (answer, selector) => selector.k.map((k) => k / answer.n);

/** 1 for every lesion patch, 0 for the others; null without a mask. */
export function lesionMap(answer) {
  if (!answer.lesion) return null;
  const map = new Uint8Array(answer.n);
  for (const patch of answer.lesion) map[patch] = 1;
  return map;
}

/** A fraction as a percentage without false precision: 93%, 0.4%, 99.6%. */
export function percent(value) {
  const points = 100 * value;
  if (points > 0 && points < 0.95) return points < 0.05 ? "<0.1%" : `${points.toFixed(1)}%`;
  if (points > 99 && points < 100) return `${(Math.floor(points * 10) / 10).toFixed(1)}%`;
  return `${Math.round(points)}%`;
}

/** The numbers as text, for screen readers. */
export function sentence(title, view) {
  const parts = [`${title}: ${view.k} of ${view.n} ${view.kept ? "patches kept" : "tokens"}`];
  if (view.retention !== null) parts.push(`retention ${percent(view.retention)}, ceiling ${percent(view.ceiling)}`);
  if (view.label !== null) parts.push(`${view.label} ${percent(view.probabilities[view.top])}`);
  return `${parts.join("; ")}.`;
}
