// What the first bytes of an image file say: its kind and size, and whether the file is complete. Read before the browser decodes
// the file, because a browser shows half of a cut file without a word and allocates whatever a header asks for.

const text = (bytes, start, length) => String.fromCharCode(...bytes.subarray(start, start + length));
const big = (bytes, at, length = 4) => bytes.subarray(at, at + length).reduce((sum, byte) => sum * 256 + byte, 0);
const little = (bytes, at, length = 2) => Array.from(bytes.subarray(at, at + length)).reduceRight((sum, byte) => sum * 256 + byte, 0);

/** {kind, width, height, complete, frames} of a file that browsers decode, or null. `frames` is 1 if the header does not tell. */
export function readHeader(bytes) {
  if (bytes[0] === 0xff && bytes[1] === 0xd8) return jpeg(bytes);
  if (text(bytes, 1, 3) === "PNG") return png(bytes);
  if (text(bytes, 0, 3) === "GIF") return gif(bytes);
  if (text(bytes, 0, 4) === "RIFF" && text(bytes, 8, 4) === "WEBP") return webp(bytes);
  if (text(bytes, 0, 2) === "BM") {
    const complete = bytes.length >= little(bytes, 2, 4);
    return { kind: "BMP", width: little(bytes, 18, 4), height: Math.abs(little(bytes, 22, 4) | 0), complete, frames: 1 };
  }
  return null;
}

function jpeg(bytes) {
  const found = { kind: "JPEG", width: 0, height: 0, complete: false, frames: 1 };
  let at = 2;
  while (at + 9 < bytes.length) {
    if (bytes[at] !== 0xff) return found;
    const marker = bytes[at + 1];
    if (marker === 0xff) {
      at += 1;
      continue;
    }
    // Start of frame: all of C0 to CF but the tables C4, C8 and CC.
    if (marker >= 0xc0 && marker <= 0xcf && ![0xc4, 0xc8, 0xcc].includes(marker)) {
      found.height = big(bytes, at + 5, 2);
      found.width = big(bytes, at + 7, 2);
    }
    at += 2 + big(bytes, at + 2, 2);
    if (marker === 0xda) {
      // Compressed data follow, in which FF D9 stands for the end alone.
      for (let i = at; i + 1 < bytes.length && !found.complete; i += 1) found.complete = bytes[i] === 0xff && bytes[i + 1] === 0xd9;
      return found;
    }
  }
  return found;
}

function png(bytes) {
  const found = { kind: "PNG", width: big(bytes, 16), height: big(bytes, 20), complete: false, frames: 1 };
  for (let at = 8; at + 12 <= bytes.length; at += 12 + big(bytes, at)) {
    const name = text(bytes, at + 4, 4);
    if (name === "acTL") found.frames = big(bytes, at + 8);
    if (name === "IEND") found.complete = true;
  }
  return found;
}

function gif(bytes) {
  const found = { kind: "GIF", width: little(bytes, 6), height: little(bytes, 8), complete: false, frames: 0 };
  let at = 13 + (bytes[10] & 0x80 ? 3 << ((bytes[10] & 7) + 1) : 0);
  const skipBlocks = () => {
    while (at < bytes.length && bytes[at]) at += 1 + bytes[at];
    at += 1;
  };
  while (at < bytes.length) {
    if (bytes[at] === 0x3b) return { ...found, complete: true };
    if (bytes[at] === 0x2c) {
      found.frames += 1;
      at += 11 + (bytes[at + 9] & 0x80 ? 3 << ((bytes[at + 9] & 7) + 1) : 0);
    } else at += 2;
    skipBlocks();
  }
  return found;
}

function webp(bytes) {
  const found = { kind: "WebP", width: 0, height: 0, complete: bytes.length >= 8 + little(bytes, 4, 4), frames: 1 };
  const chunk = text(bytes, 12, 4);
  if (chunk === "VP8X") return { ...found, width: 1 + little(bytes, 24, 3), height: 1 + little(bytes, 27, 3), frames: bytes[20] & 2 ? 2 : 1 };
  if (chunk === "VP8L") {
    const packed = little(bytes, 21, 4);
    return { ...found, width: 1 + (packed & 0x3fff), height: 1 + ((packed >> 14) & 0x3fff) };
  }
  return { ...found, width: little(bytes, 26) & 0x3fff, height: little(bytes, 28) & 0x3fff };
}
