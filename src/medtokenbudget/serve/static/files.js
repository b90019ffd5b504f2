// Files that are chosen, dropped or pasted: which are images, which masks of them, and what downloads are called.

const IMAGE = /\.(jpe?g|png|tiff?|bmp|webp|gif|ppm|pgm|jp2|dcm|dicom)$/i;
const pathOf = (file) => file.path ?? file.webkitRelativePath ?? "";
const inMaskFolder = (file) => /(^|\/)[^/]*(mask|segment)[^/]*\//i.test(pathOf(file));
const isMask = (file) => /mask|segment|_seg\b/i.test(file.name) || inMaskFolder(file);
const isImage = (file) => file.type.startsWith("image/") || IMAGE.test(file.name);

/** A file name without its extension. */
export const stem = (name) => name.replace(/\.[^.]*$/, "");

/** Whether a mask belongs to an image: skin_mask.png or masks/skin.png to skin.jpg. */
const belongs = (mask, image) => (inMaskFolder(mask) ? stem(mask.name) === stem(image.name) : false) || (isMask({ name: mask.name }) && mask.name.startsWith(stem(image.name)));

/**
 * Sort files into {image, mask}, {mask} or {stack: [{image, mask, name}], skipped} (several images; `skipped` other files).
 * `opened` is the name of the opened image file, or null: a mask whose name starts like it (skin.jpg, skin_mask.png) belongs to it, so
 * only {mask} is returned.
 */
export function sortFiles(files, opened) {
  if (files.length === 1) {
    const [file] = files;
    const added = opened && isMask(file) && !isMask({ name: opened }) && file.name.startsWith(stem(opened));
    return added ? { mask: file } : { image: file };
  }
  const known = files.filter(isImage);
  const masks = known.filter(isMask);
  const images = masks.length < known.length ? known.filter((file) => !masks.includes(file)) : known;
  if (images.length === 1 && files.length === 2 && masks.length === 1) return { image: images[0], mask: masks[0] };
  const stack = images.map((image) => ({ image, mask: images === known ? undefined : closest(masks, image), name: pathOf(image) || image.name }));
  stack.sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
  return { stack, skipped: files.length - known.length };
}

/** The mask of an image: of several that begin like it, the one with the shortest name (a_mask.png, not a_b_mask.png, for a.jpg). */
function closest(masks, image) {
  return masks.filter((mask) => belongs(mask, image)).sort((a, b) => a.name.length - b.name.length)[0];
}

/** Name of a download: after the image file or the title of the sample, never after the mask. */
export function downloadName(source, budget, extension) {
  const base = source.file ? stem(source.file) : source.title.toLowerCase().replace(/[^a-z0-9]+/g, "-");
  return `${base}-budget-${budget}.${extension}`;
}

/** Call `onFiles(files)` for files dropped anywhere on the page, folders included; `veil` is shown while they are dragged over it. */
export function listenForDrops(veil, onFiles) {
  let depth = 0;
  const hasFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  addEventListener("dragenter", (event) => {
    if (!hasFiles(event)) return;
    depth += 1;
    veil.hidden = false;
  });
  addEventListener("dragleave", (event) => {
    if (!hasFiles(event)) return;
    depth -= 1;
    if (depth <= 0) veil.hidden = true;
  });
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", async (event) => {
    event.preventDefault();
    depth = 0;
    veil.hidden = true;
    const files = await droppedFiles(event.dataTransfer);
    if (files.length) onFiles(files);
  });
}

/** Call `onFiles(files)` for images that are pasted from the clipboard. */
export function listenForPaste(onFiles) {
  addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    onFiles(files);
  });
}

async function droppedFiles(transfer) {
  // Entries must be taken before the first await: the list is empty afterwards.
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.some((entry) => entry.isDirectory)) return [...transfer.files];
  return (await Promise.all(entries.map(filesIn))).flat();
}

async function filesIn(entry) {
  if (entry.isFile) {
    const file = await new Promise((done, fail) => entry.file(done, fail));
    file.path = entry.fullPath.replace(/^\//, "");
    return [file];
  }
  const reader = entry.createReader();
  const inside = [];
  // A reader gives a folder in parts, until an empty one.
  for (;;) {
    const part = await new Promise((done, fail) => reader.readEntries(done, fail));
    if (!part.length) break;
    inside.push(...part);
  }
  return (await Promise.all(inside.map(filesIn))).flat();
}
