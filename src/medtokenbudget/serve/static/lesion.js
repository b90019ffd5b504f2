// The lesion that the model sees, as a mask, boxes and a crop: what `mtb route --mask --box --crop` writes.

const SPECK = 0.02; // smaller parts, relative to the area of the largest, are left out
const MARGIN = 0.1; // around a crop, relative to the longer side of its box

/** The two cells next to each pixel and the share of the second, as bilinear enlarging takes them. */
function neighbors(cells, pixels) {
  return Array.from({ length: pixels }, (_, i) => {
    const place = ((i + 0.5) * cells) / pixels - 0.5;
    const low = Math.floor(place);
    return [Math.max(0, low), Math.min(cells - 1, low + 1), place - low];
  });
}

/** 1 where the lesion probability, enlarged to the image, is above one half. */
export function lesionMask({ grid: [h, w], values }, width, height) {
  const columns = neighbors(w, width);
  const lines = Array.from({ length: h }, (_, row) => Float32Array.from(columns, ([a, b, share]) => (1 - share) * values[row * w + a] + share * values[row * w + b]));
  const mask = new Uint8Array(width * height);
  neighbors(h, height).forEach(([a, b, share], y) => {
    for (let x = 0; x < width; x += 1) mask[y * width + x] = (1 - share) * lines[a][x] + share * lines[b][x] > 0.5 ? 1 : 0;
  });
  return mask;
}

/** Left, top, right and bottom of each connected part of a mask, the largest part first. */
export function lesionBoxes(mask, width, height) {
  const parts = [];
  const whole = (part) => {
    while (part.into) part = part.into;
    return part;
  };
  let above = [];
  for (let y = 0; y < height; y += 1) {
    const runs = [];
    for (let x = 0; x < width; x += 1) {
      if (!mask[y * width + x]) continue;
      const start = x;
      while (x < width && mask[y * width + x]) x += 1;
      const part = { area: x - start, left: start, top: y, right: x, bottom: y + 1, into: null };
      parts.push(part);
      runs.push({ start, end: x, part });
      for (const run of above) if (run.start < x && run.end > start) join(whole(run.part), whole(part));
    }
    above = runs;
  }
  const found = parts.filter((part) => !part.into).sort((a, b) => b.area - a.area);
  return found.filter(({ area }) => area >= SPECK * found[0].area).map(({ left, top, right, bottom }) => [left, top, right, bottom]);
}

function join(a, b) {
  if (a === b) return;
  a.area += b.area;
  a.left = Math.min(a.left, b.left);
  a.top = Math.min(a.top, b.top);
  a.right = Math.max(a.right, b.right);
  a.bottom = Math.max(a.bottom, b.bottom);
  b.into = a;
}

/** A box with room around it, within the image. */
export function withMargin([left, top, right, bottom], width, height) {
  const exact = MARGIN * Math.max(right - left, bottom - top);
  const even = exact % 1 === 0.5 && Math.round(exact) % 2 === 1; // Python rounds halves to even numbers
  const room = Math.round(exact) - (even ? 1 : 0);
  return [Math.max(0, left - room), Math.max(0, top - room), Math.min(width, right + room), Math.min(height, bottom + room)];
}

function canvasOf(width, height) {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  return [canvas, canvas.getContext("2d")];
}

const asPng = (canvas) => new Promise((done) => canvas.toBlob(done, "image/png"));

/** White on black, as large as the image. */
export function maskPicture(mask, width, height) {
  const [canvas, pen] = canvasOf(width, height);
  const data = pen.createImageData(width, height);
  new Uint32Array(data.data.buffer).set(Uint32Array.from(mask, (inside) => (inside ? 0xffffffff : 0xff000000)));
  pen.putImageData(data, 0, 0);
  return asPng(canvas);
}

/** The largest lesion, cut out of the file; of one that this browser cannot decode, out of its preview. */
export async function cropPicture(file, preview, box, width, height) {
  const picture = await createImageBitmap(file).catch(() => createImageBitmap(preview));
  const [left, top, right, bottom] = withMargin(box, width, height);
  const [canvas, pen] = canvasOf(right - left, bottom - top);
  const [across, down] = [picture.width / width, picture.height / height];
  pen.drawImage(picture, left * across, top * down, (right - left) * across, (bottom - top) * down, 0, 0, right - left, bottom - top);
  return asPng(canvas);
}
