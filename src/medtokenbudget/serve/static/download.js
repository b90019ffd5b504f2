// Downloads of the current view as PNG and JSON, made in the browser without a request.

import { paint } from "./draw.js";
import { percent } from "./view.js";

export function saveBlob(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** The results of the shown methods at every budget, and the current budget. */
export function asData(answer, names, budget) {
  const { image, ...rest } = answer;
  return {
    ...rest,
    image: { width: image.width, height: image.height },
    shown: { budget, selectors: names },
    selectors: answer.selectors.filter((selector) => names.includes(selector.name)),
  };
}

/** The panels side by side with their titles, on white, with the notice below. */
export function asPicture(panels, scene, budget, notice) {
  const side = 640;
  const height = Math.round((side * scene.picture.naturalHeight) / scene.picture.naturalWidth);
  const [margin, head, foot] = [24, 74, 44];
  const canvas = document.createElement("canvas");
  canvas.width = margin + panels.length * (side + margin);
  canvas.height = head + height + foot;
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#ffffff";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  panels.forEach((panel, i) => {
    const left = margin + i * (side + margin);
    pen.fillStyle = "#1b242c";
    pen.font = "600 22px system-ui, 'Liberation Sans', sans-serif";
    pen.fillText(panel.title, left, 32);
    pen.font = "17px system-ui, 'Liberation Sans', sans-serif";
    pen.fillStyle = "#54626e";
    pen.fillText(caption(panel.view, budget), left, 58);
    const layer = document.createElement("canvas");
    layer.width = side;
    layer.height = height;
    paint(layer.getContext("2d"), side, height, scene, panel.view, panel.show);
    pen.drawImage(layer, left, head);
  });
  pen.font = "14px system-ui, 'Liberation Sans', sans-serif";
  pen.fillStyle = "#54626e";
  pen.fillText(`${notice.split(". ")[0]}.`, margin, head + height + 28);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

function caption(view, budget) {
  const kept = `${percent(budget)} budget, ${view.k} of ${view.n} ${view.kept ? "patches" : "tokens"}`;
  const lesion = view.retention === null ? "" : ` · retention ${percent(view.retention)} (ceiling ${percent(view.ceiling)})`;
  const label = view.label === null ? "" : ` · ${view.label} ${percent(view.probabilities[view.top])}`;
  return `${kept}${lesion}${label}`;
}
