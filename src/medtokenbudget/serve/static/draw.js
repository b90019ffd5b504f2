// Draws one panel on a canvas: the image, kept patches, score map, kept and lost lesion.

const BLUE = "#0072b2";
const ORANGE = "#e69f00";
// Cividis, a color map for all kinds of color vision: dark is low, yellow is high.
const RAMP = [[0, 34, 78], [53, 69, 108], [102, 105, 112], [148, 142, 119], [200, 184, 102], [254, 232, 56]];

function ramp(t) {
  const x = Math.min(0.9999, Math.max(0, t)) * (RAMP.length - 1);
  const i = Math.floor(x);
  const f = x - i;
  const mix = RAMP[i].map((c, j) => Math.round(c + f * (RAMP[i + 1][j] - c)));
  return `rgb(${mix.join(",")})`;
}

/** Mean color of each patch, for merged tokens. The browser computes it by scaling the image down to the grid. */
export function patchColors(picture, [h, w]) {
  let source = picture;
  let width = source.naturalWidth || source.width;
  let height = source.naturalHeight || source.height;
  // In steps of two, because one large step skips pixels.
  while (width > 2 * w || height > 2 * h) {
    width = Math.max(w, Math.ceil(width / 2));
    height = Math.max(h, Math.ceil(height / 2));
    source = shrunk(source, width, height);
  }
  const small = shrunk(source, w, h);
  return small.getContext("2d").getImageData(0, 0, w, h).data;
}

function shrunk(source, width, height) {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const pen = canvas.getContext("2d");
  pen.imageSmoothingQuality = "high";
  pen.drawImage(source, 0, 0, width, height);
  return canvas;
}

/**
 * Draw with `pen` within [0, 0, width, height].
 * scene: {picture, grid, colors, lesion (map or null)}; view: from view.js; show: {scores: array or null, lesion: bool}
 */
export function paint(pen, width, height, scene, view, show) {
  const [h, w] = scene.grid;
  const xs = Array.from({ length: w + 1 }, (_, i) => Math.round((i / w) * width));
  const ys = Array.from({ length: h + 1 }, (_, i) => Math.round((i / h) * height));
  const cell = (i) => [xs[i % w], ys[Math.floor(i / w)], xs[(i % w) + 1] - xs[i % w], ys[Math.floor(i / w) + 1] - ys[Math.floor(i / w)]];
  const line = Math.max(1, width / 420);
  pen.clearRect(0, 0, width, height);
  pen.imageSmoothingQuality = "high";
  pen.drawImage(scene.picture, 0, 0, width, height);
  if (view.groups) paintGroups(pen, view.groups, scene.colors, cell);
  if (show.scores) paintScores(pen, show.scores, cell);
  if (view.kept) paintVeil(pen, view.kept, cell, Boolean(show.scores));
  if (show.lesion && scene.lesion && view.kept) paintLesion(pen, view.kept, scene.lesion, cell, line, Boolean(show.scores));
  if (view.kept) border(pen, view.kept, [h, w], xs, ys, "rgba(255,255,255,.95)", 1.4 * line, "rgba(10,18,26,.75)");
  if (view.groups) border(pen, view.groups, [h, w], xs, ys, "rgba(255,255,255,.8)", line, "rgba(10,18,26,.45)");
  if (show.lesion && scene.lesion) border(pen, scene.lesion, [h, w], xs, ys, BLUE, 2.4 * line, "rgba(255,255,255,.9)");
}

function paintVeil(pen, kept, cell, light) {
  pen.fillStyle = light ? "rgba(16,22,28,.35)" : "rgba(16,22,28,.72)";
  for (let i = 0; i < kept.length; i += 1) if (!kept[i]) pen.fillRect(...cell(i));
}

function paintScores(pen, scores, cell) {
  let low = Infinity;
  let high = -Infinity;
  for (const score of scores) {
    low = Math.min(low, score);
    high = Math.max(high, score);
  }
  pen.globalAlpha = 0.78;
  scores.forEach((score, i) => {
    pen.fillStyle = ramp(high > low ? (score - low) / (high - low) : 0.5);
    pen.fillRect(...cell(i));
  });
  pen.globalAlpha = 1;
}

function paintGroups(pen, groups, colors, cell) {
  const sums = new Map();
  groups.forEach((group, i) => {
    const sum = sums.get(group) ?? [0, 0, 0, 0];
    for (let c = 0; c < 3; c += 1) sum[c] += colors[4 * i + c];
    sum[3] += 1;
    sums.set(group, sum);
  });
  groups.forEach((group, i) => {
    const [r, g, b, n] = sums.get(group);
    // Group -1 has the patches that were dropped.
    pen.fillStyle = group < 0 ? "rgba(12,18,26,.8)" : `rgb(${Math.round(r / n)},${Math.round(g / n)},${Math.round(b / n)})`;
    pen.fillRect(...cell(i));
  });
}

function paintLesion(pen, kept, lesion, cell, line, bare) {
  for (let i = 0; i < kept.length; i += 1) {
    if (!lesion[i]) continue;
    const [x, y, width, height] = cell(i);
    if (!kept[i]) {
      hatch(pen, x, y, width, height, line);
    } else if (!bare) {
      // A light tint, and none over the score map, so the colors below stay visible.
      pen.fillStyle = "rgba(0,114,178,.14)";
      pen.fillRect(x, y, width, height);
    }
  }
}

/** Diagonal lines, so lost lesion differs by pattern as well as by color. */
function hatch(pen, x, y, width, height, line) {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, width, height);
  pen.clip();
  pen.fillStyle = "rgba(230,159,0,.22)";
  pen.fillRect(x, y, width, height);
  pen.strokeStyle = ORANGE;
  pen.lineWidth = 1.6 * line;
  pen.beginPath();
  // The phase depends on the absolute position, so lines continue from patch to patch.
  const step = Math.max(5, 7 * line);
  const first = Math.floor((x + y) / step) * step;
  for (let s = first; s < x + y + width + height; s += step) {
    pen.moveTo(s - y, y);
    pen.lineTo(s - y - height, y + height);
  }
  pen.stroke();
  pen.restore();
}

/** Lines between neighboring patches with different values. */
function border(pen, values, [h, w], xs, ys, color, thickness, halo) {
  pen.beginPath();
  for (let r = 0; r < h; r += 1) {
    for (let c = 0; c < w; c += 1) {
      const i = r * w + c;
      if (c + 1 < w && values[i] !== values[i + 1]) {
        pen.moveTo(xs[c + 1], ys[r]);
        pen.lineTo(xs[c + 1], ys[r + 1]);
      }
      if (r + 1 < h && values[i] !== values[i + w]) {
        pen.moveTo(xs[c], ys[r + 1]);
        pen.lineTo(xs[c + 1], ys[r + 1]);
      }
    }
  }
  pen.lineCap = "square";
  pen.strokeStyle = halo;
  pen.lineWidth = 2 * thickness;
  pen.stroke();
  pen.strokeStyle = color;
  pen.lineWidth = thickness;
  pen.stroke();
}
