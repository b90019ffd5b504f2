// The answer for one image, as the service gives it, from scores and logits. Pure functions: the same numbers as in Python.

/** Patches kept at a budget: min(n, max(minimum, floor(budget n))), exact for the decimal that was written. */
export function budgetToK(budget, n, minimum) {
  const [digits, exponent = "0"] = String(budget).split("e");
  const [whole, fraction = ""] = digits.split(".");
  const places = BigInt(fraction.length - Number(exponent));
  const share = (BigInt(whole + fraction) * BigInt(n)) / 10n ** places;
  return Math.min(n, Math.max(minimum, Number(share)));
}

/** Patches from best to worst; equal scores by index. */
export function rank(scores) {
  return Array.from(scores, (_, i) => i).sort((a, b) => scores[b] - scores[a] || a - b);
}

/** Scores of the controls that know the mask: lesion patches first, or by the distance to their bounding box in box sizes. */
export function scoresFromMask(selector, lesion, [h, w]) {
  if (selector === "oracle") return Array.from(lesion);
  const rows = offsets(Array.from({ length: h }, (_, y) => lesion.subarray(y * w, (y + 1) * w).includes(1)));
  const columns = offsets(Array.from({ length: w }, (_, x) => rows.some((_, y) => lesion[y * w + x])));
  return Array.from(lesion, (_, i) => -Math.max(rows[Math.floor(i / w)], columns[i % w]));
}

function offsets(inside) {
  const any = inside.includes(true);
  const low = any ? inside.indexOf(true) : 0;
  const high = any ? inside.lastIndexOf(true) : inside.length - 1;
  return inside.map((_, place) => Math.abs(2 * place - low - high) / (high - low + 1));
}

const round = (value) => Math.round(value * 1e6) / 1e6;

export function softmax(logits) {
  const top = Math.max(...logits);
  const powers = Array.from(logits, (value) => Math.exp(value - top));
  const sum = powers.reduce((total, value) => total + value, 0);
  return powers.map((value) => round(value / sum));
}

function retention(order, lesion, counts) {
  const size = lesion.reduce((sum, value) => sum + value, 0);
  const kept = [0];
  for (const patch of order) kept.push(kept[kept.length - 1] + lesion[patch]);
  return {
    retention: counts.map((k) => round(kept[k] / size)),
    ceiling: counts.map((k) => round(Math.min(k, size) / size)),
    retention_of_ceiling: counts.map((k) => round(kept[k] / Math.min(k, size))),
  };
}

/** The share of the squared scores that is in each patch and in all ranked after it, the best patch first. */
function relativeScores(scores) {
  const shares = Float64Array.from(scores).sort();
  let sum = 0;
  for (let i = 0; i < shares.length; i += 1) {
    sum += shares[i] ** 2;
    shares[i] = sum;
  }
  return shares.map((share) => share / Math.max(sum, Number.MIN_VALUE)).reverse();
}

/** How many patches keep a calibrated promise: those with its threshold or a higher score, within its limits. */
function promiseAnswer({ retention, coverage, threshold, relative, minimum, most }, scores, logits, classes) {
  const above = (relative ? relativeScores(scores) : scores).reduce((sum, score) => sum + (score >= threshold ? 1 : 0), 0);
  const k = Math.min(most, Math.max(minimum, above));
  return { retention, coverage, k, probabilities: logits ? softmax(logits.subarray((k - 1) * classes, k * classes)) : null };
}

const digits = (values) => Array.from(values, (value) => Number(value.toPrecision(6)));

/** One method: `method` describes it, `seen` is its lesion probability or null, `promises` are those calibrated for it, `logits` is [N, C] flat, one row for each K, or undefined without a head. */
export function methodAnswer(method, seen, promises, order, scores, logits, budgets, lesion, classes) {
  const n = order.length;
  const counts = budgets.map((budget) => (method.keeps_all ? n : budgetToK(budget, n, method.minimum)));
  const measured = lesion && lesion.includes(1) ? retention(order, lesion, counts) : { retention: null, ceiling: null, retention_of_ceiling: null };
  return {
    name: method.name,
    kind: method.kind,
    k: counts,
    order,
    scores: digits(scores),
    groups: null,
    ...measured,
    promises: promises.map((promise) => promiseAnswer(promise, scores, logits, classes)),
    probabilities: logits ? counts.map((k) => softmax(logits.subarray((k - 1) * classes, k * classes))) : null,
    lesion_map: seen && { grid: Array.from(seen.grid), values: digits(seen.values) },
  };
}
