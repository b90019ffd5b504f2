// Files that are chosen or dropped: which one is the image, which one its mask, and what downloads are called.

const isMask = (file) => /mask|segment|_seg\b/i.test(file.name);

/** A file name without its extension. */
export const stem = (name) => name.replace(/\.[^.]*$/, "");

/**
 * Sort dropped files into {image, mask} or {error}. `opened` is the name of the opened image file, or null: a mask whose name
 * starts like it (skin.jpg, skin_mask.png) belongs to it, so only {mask} is returned.
 */
export function sortFiles(files, opened) {
  if (files.length === 1 && opened && isMask(files[0]) && !isMask({ name: opened }) && files[0].name.startsWith(stem(opened))) {
    return { mask: files[0] };
  }
  const mask = files.length > 1 ? files.find(isMask) : undefined;
  if (files.length > 2 || (files.length === 2 && !mask)) {
    return { error: "Drop one image, or one image and its mask. The file name of the mask must contain “mask” or “segmentation”." };
  }
  return { image: files.find((file) => file !== mask), mask };
}

/** Name of a download: after the image file or the title of the sample, never after the mask. */
export function downloadName(source, budget, extension) {
  const base = source.file ? stem(source.file) : source.title.toLowerCase().replace(/[^a-z0-9]+/g, "-");
  return `${base}-budget-${budget}.${extension}`;
}

/** Call `onFiles(files)` for files dropped anywhere on the page; `veil` is shown while they are dragged over it. */
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
  addEventListener("drop", (event) => {
    event.preventDefault();
    depth = 0;
    veil.hidden = true;
    const files = [...event.dataTransfer.files];
    if (files.length) onFiles(files);
  });
}
