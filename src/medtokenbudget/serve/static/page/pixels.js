// From an image file to what the model reads, by the rules of the Python package: orientation from EXIF, no color management, nothing
// cropped, and a clear message for every file that cannot be read without guessing.

import { readHeader } from "./header.js";
import { Resizer } from "./resize.js";

const STRIP = 4_000_000; // pixels that are read from the canvas at a time
const PREVIEW_SIDE = 1024;
const ASPECT_TOLERANCE = 0.02;

/** A file that cannot be used; `code` is that of the service. */
export class FileError extends Error {
  constructor(code, message) {
    super(message);
    this.code = code;
  }
}

/** The decoded file as an ImageBitmap, turned by its EXIF orientation. `what`: "The image" or "The mask". */
export async function decode(blob, what, maxPixels) {
  const bytes = new Uint8Array(await blob.arrayBuffer());
  if (!bytes.length) throw new FileError("empty", `${what} is empty (0 bytes).`);
  const header = readHeader(bytes);
  if (!header) throw new FileError("not_an_image", `${what} is not an image in a format that this page reads (JPEG, PNG, WebP, BMP, GIF).`);
  const { width, height } = header;
  if (width * height > maxPixels) {
    throw new FileError("too_many_pixels", `${what} has ${width} x ${height} pixels, more than the allowed ${maxPixels.toLocaleString("en")}. Resize it first.`);
  }
  if (!header.complete) throw new FileError("damaged", `${what} is damaged or incomplete. Download or copy it again.`);
  if (header.frames > 1) throw new FileError("frames", `${what} contains several frames. Save the one you need as a separate file.`);
  try {
    return await createImageBitmap(new Blob([bytes]), { imageOrientation: "from-image", colorSpaceConversion: "none", premultiplyAlpha: "none" });
  } catch (error) {
    if (outOfMemory(error)) throw error;
    throw new FileError("damaged", `${what} is damaged or incomplete. Download or copy it again.`);
  }
}

/** The whole bitmap resized to {data [height, width, channels], brightest}, in strips of rows. */
export function resized(bitmap, width, height, filter, channels, what) {
  const resizer = new Resizer(bitmap.width, bitmap.height, width, height, filter, channels);
  const rows = Math.max(1, Math.min(bitmap.height, Math.floor(STRIP / bitmap.width)));
  const canvas = new OffscreenCanvas(bitmap.width, rows);
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  for (let top = 0; top < bitmap.height; top += rows) {
    const count = Math.min(rows, bitmap.height - top);
    pen.clearRect(0, 0, bitmap.width, rows);
    pen.drawImage(bitmap, 0, -top);
    resizer.push(pen.getImageData(0, 0, bitmap.width, count).data);
    if (!resizer.opaque) {
      throw new FileError("alpha", `${what} has transparent pixels, so its colors depend on the background. Flatten it onto a background first.`);
    }
  }
  return { data: resizer.finish(), brightest: resizer.brightest };
}

/** 1 for every lesion patch of a grid [h, w], in raster order, from a mask of an image of this size. */
export function lesionOf(mask, image, [h, w]) {
  if (Math.abs((mask.width * image.height) / (mask.height * image.width) - 1) > ASPECT_TOLERANCE) {
    const sizes = `The mask has ${mask.width} x ${mask.height} pixels, but the image has ${image.width} x ${image.height}.`;
    throw new FileError("bad_request", `${sizes} Choose a mask with the same aspect ratio as the image.`);
  }
  const { data, brightest } = resized(mask, w, h, "bilinear", 1, "The mask");
  if (brightest > 0 && brightest < 128) {
    const values = `The mask has values from 0 to ${brightest}, so no pixel of it counts as lesion.`;
    throw new FileError("bad_request", `${values} Choose a mask with 255 for lesion pixels and 0 for all others.`);
  }
  return Uint8Array.from(data, (value) => (value / 255 > 0.5 ? 1 : 0));
}

/** The bitmap as a JPEG, reduced for display. */
export function preview(bitmap) {
  const scale = Math.min(1, PREVIEW_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = new OffscreenCanvas(Math.max(1, Math.round(bitmap.width * scale)), Math.max(1, Math.round(bitmap.height * scale)));
  const pen = canvas.getContext("2d");
  pen.imageSmoothingQuality = "high";
  pen.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.convertToBlob({ type: "image/jpeg", quality: 0.9 });
}

/** Whether this browser returns the pixels that were drawn. Some change them at random, against fingerprinting. */
export function canvasIsFaithful() {
  const canvas = new OffscreenCanvas(32, 32);
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  const drawn = pen.createImageData(32, 32);
  for (let i = 0; i < drawn.data.length; i += 1) drawn.data[i] = i % 4 === 3 ? 255 : (i * 37) % 251;
  pen.putImageData(drawn, 0, 0);
  const read = pen.getImageData(0, 0, 32, 32).data;
  return read.every((value, i) => value === drawn.data[i]);
}

export const outOfMemory = (error) => error instanceof RangeError || /memory|alloc|OOM/i.test(String(error?.message ?? error));
