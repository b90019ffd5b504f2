// Pillow's antialiased resize in JavaScript, to the last bit: two passes with coefficients in fixed point. A canvas resizes otherwise.

const BITS = 22; // precision of the coefficients: 32 bits, less 8 for the pixel and 2 for overshoot
const HALF = 1 << (BITS - 1);

const sinc = (x) => (x === 0 ? 1 : Math.sin(x * Math.PI) / (x * Math.PI));

const FILTERS = {
  bilinear: { support: 1, at: (x) => Math.max(0, 1 - Math.abs(x)) },
  bicubic: {
    support: 2,
    at(value) {
      const a = -0.5;
      const x = Math.abs(value);
      if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
      return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0;
    },
  },
  lanczos: { support: 3, at: (x) => (x >= -3 && x < 3 ? sinc(x) * sinc(x / 3) : 0) },
};

/** For each output position where its window starts, how long it is, and its weights: {starts, counts, weights, length}. */
export function coefficients(from, to, filter) {
  const { support, at } = FILTERS[filter];
  const scale = from / to;
  const stretch = Math.max(scale, 1);
  const reach = support * stretch;
  const length = Math.ceil(reach) * 2 + 1;
  const starts = new Int32Array(to);
  const counts = new Int32Array(to);
  const weights = new Int32Array(to * length);
  const exact = new Float64Array(length);
  for (let place = 0; place < to; place += 1) {
    const center = (place + 0.5) * scale;
    const first = Math.max(0, Math.trunc(center - reach + 0.5));
    const count = Math.min(from, Math.trunc(center + reach + 0.5)) - first;
    let sum = 0;
    for (let i = 0; i < count; i += 1) {
      exact[i] = at((i + first - center + 0.5) * (1 / stretch));
      sum += exact[i];
    }
    for (let i = 0; i < count; i += 1) {
      const share = sum === 0 ? exact[i] : exact[i] * (1 / sum);
      weights[place * length + i] = Math.trunc((share < 0 ? -0.5 : 0.5) + share * (1 << BITS));
    }
    starts[place] = first;
    counts[place] = count;
  }
  return { starts, counts, weights, length };
}

const clip = (sum) => Math.min(255, Math.max(0, sum >> BITS));

/**
 * Resizes an image whose rows arrive in strips, so that a large image is never in memory as a whole.
 * channels: 3 keeps red, green and blue of RGBA strips; 1 makes Pillow's gray of them.
 */
export class Resizer {
  constructor(width, height, toWidth, toHeight, filter, channels = 3) {
    Object.assign(this, { width, height, toWidth, toHeight, channels });
    this.across = coefficients(width, toWidth, filter);
    this.down = coefficients(height, toHeight, filter);
    // Rows first, or columns first in tall images: rounding in between makes a difference of one, so the order is Pillow's too.
    this.tall = height > toHeight && height - toHeight > 2 * (width - toWidth);
    if (this.tall) this.sums = new Int32Array(toHeight * width * channels).fill(HALF);
    else this.narrow = new Uint8Array(height * toWidth * channels);
    this.row = 0;
    this.reached = 0; // the first output row that still needs rows
    this.brightest = 0; // of the gray values
    this.opaque = true;
  }

  /** The next rows of the image, RGBA. */
  push(rgba) {
    const { width, toWidth, channels } = this;
    const rows = rgba.length / (4 * width);
    const line = new Uint8Array(width * channels);
    for (let y = 0; y < rows; y += 1) {
      this.#read(rgba, 4 * y * width, line);
      if (this.tall) this.#add(line);
      else this.#narrow(line, this.narrow, this.row * toWidth * channels);
      this.row += 1;
    }
  }

  /** The resized image, [toHeight, toWidth, channels]. */
  finish() {
    const { width, toWidth, toHeight, channels } = this;
    const out = new Uint8Array(toHeight * toWidth * channels);
    for (let y = 0; y < toHeight; y += 1) {
      if (this.tall) {
        const line = Uint8Array.from(this.sums.subarray(y * width * channels, (y + 1) * width * channels), clip);
        this.#narrow(line, out, y * toWidth * channels);
      } else this.#collect(y, out);
    }
    return out;
  }

  #read(rgba, start, line) {
    const { width, channels } = this;
    for (let x = 0; x < width; x += 1) {
      const i = start + 4 * x;
      if (rgba[i + 3] !== 255) this.opaque = false;
      if (channels === 3) {
        line[3 * x] = rgba[i];
        line[3 * x + 1] = rgba[i + 1];
        line[3 * x + 2] = rgba[i + 2];
      } else {
        const gray = (rgba[i] * 19595 + rgba[i + 1] * 38470 + rgba[i + 2] * 7471 + 0x8000) >> 16;
        line[x] = gray;
        if (gray > this.brightest) this.brightest = gray;
      }
    }
  }

  /** One row to its new width. */
  #narrow(line, out, base) {
    const { toWidth, channels } = this;
    const { starts, counts, weights, length } = this.across;
    for (let x = 0; x < toWidth; x += 1) {
      for (let c = 0; c < channels; c += 1) {
        let sum = HALF;
        for (let i = 0, at = starts[x] * channels + c, w = x * length; i < counts[x]; i += 1, at += channels, w += 1) sum += line[at] * weights[w];
        out[base + x * channels + c] = clip(sum);
      }
    }
  }

  /** One output row of narrow rows. */
  #collect(y, out) {
    const { starts, counts, weights, length } = this.down;
    const { narrow } = this;
    const stride = this.toWidth * this.channels;
    for (let x = 0; x < stride; x += 1) {
      let sum = HALF;
      for (let i = 0, at = starts[y] * stride + x, w = y * length; i < counts[y]; i += 1, at += stride, w += 1) sum += narrow[at] * weights[w];
      out[y * stride + x] = clip(sum);
    }
  }

  /** A row of full width to the sums of all output rows that it is part of. */
  #add(line) {
    const { sums, row, toHeight } = this;
    const { starts, counts, weights, length } = this.down;
    while (this.reached < toHeight && starts[this.reached] + counts[this.reached] <= row) this.reached += 1;
    for (let y = this.reached; y < toHeight && starts[y] <= row; y += 1) {
      const weight = weights[y * length + row - starts[y]];
      for (let x = 0, at = y * line.length; x < line.length; x += 1, at += 1) sums[at] += line[x] * weight;
    }
  }
}
