// What the chart over all budgets shows: lines and text for one or two methods. Pure functions; chart.js draws them.

import { expectedOfRandom } from "./view.js";

/** The class whose probability is shown: the true one if it is known, else the most probable one over all budgets. */
function shownClass(answer, shown, truth) {
  if (answer.classes.includes(truth)) return truth;
  const rows = shown[0].selector.probabilities;
  const sums = answer.classes.map((_, i) => rows.reduce((sum, row) => sum + row[i], 0));
  return answer.classes[sums.indexOf(Math.max(...sums))];
}

function retentionLines(answer, shown, main) {
  // Ceiling of a method that keeps K patches at each budget; methods that keep all patches have a ceiling of 100%.
  const reference = answer.selectors.find((s) => s.ceiling && s.name === main) ?? shown.find((s) => s.selector.ceiling).selector;
  const lines = [
    { style: "ceiling", name: "Ceiling", values: reference.ceiling },
    { style: "random", name: "Random, expected", values: expectedOfRandom(answer, reference) },
  ];
  for (const { side, title, selector } of shown) {
    if (selector.retention) lines.push({ style: side, name: title, values: selector.retention, point: true });
  }
  return lines;
}

function probabilityLines(answer, shown, name) {
  const column = answer.classes.indexOf(name);
  return shown.map(({ side, title, selector }) => ({
    style: side,
    name: `${title}: ${name}`,
    values: selector.probabilities.map((row) => row[column]),
    point: true,
  }));
}

/**
 * Everything about the curve. `shown`: [{side, title, selector}]; `wanted`: "retention" or "probability"; `main`: the main method.
 * Returns {possible (whether there is a retention to show), retention (whether it is shown), lines, title, text}. A router without a
 * head has no probabilities; without a mask it then has no lines.
 */
export function curve(answer, shown, wanted, main, truth) {
  const possible = shown.some(({ selector }) => selector.retention);
  const classes = answer.classes.length > 0;
  if (possible && (wanted === "retention" || !classes)) {
    const text =
      "Share of lesion patches that are kept at each budget. Dashed: the highest share possible with the same number of patches. Dotted: the expected share of randomly chosen patches.";
    return { possible, retention: true, lines: retentionLines(answer, shown, main), title: "Lesion retention at each budget", text };
  }
  if (!classes) {
    let text = "This router predicts no class. Add a mask to see how much of the lesion it keeps.";
    if (answer.lesion) text = "There is no retention to show: the mask covers none of the patches, or the methods merge patches.";
    return { possible, retention: false, lines: [], title: "Lesion retention at each budget", text };
  }
  const name = shownClass(answer, shown, truth);
  let text = `Probability of ${name} at each budget, from the classification head of each method.`;
  if (!possible) {
    if (!answer.lesion) text += " Add a mask to see the lesion retention.";
    else if (answer.lesion.length) text += " Methods that merge patches have no retention.";
  }
  const title = "Class probability at each budget";
  return { possible, retention: false, lines: probabilityLines(answer, shown, name), title, text };
}
