// The contact sheet: a whole folder or a stack of images, one after the other, as thumbnails and as a table. Both follow the budget and
// the method of the page.

import { patchColors, paint } from "./draw.js";
import { saveBlob } from "./download.js";
import { at, lesionMap, percent } from "./view.js";

const SIDE = 168; // longest side of a thumbnail in pixels
const FEW = 24; // images that are drawn anew within a frame
const COLUMNS = ["file", "width", "height", "method", "budget", "k", "n", "class", "probability", "retention", "ceiling", "retention_of_ceiling", "error"];

const byId = (id) => document.getElementById(id);

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

/** A text with commas, quotes or line breaks is quoted; one that a spreadsheet would run as a formula gets an apostrophe. */
function csvField(value) {
  const text = value === null || value === undefined ? "" : String(value);
  const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

export class Sheet {
  /** ask(image, mask, signal): an answer; choice(): {method, budget, stop (answer => index)}; onOpen(pair): show one image. */
  constructor(ask, choice, onOpen) {
    Object.assign(this, { ask, choice, onOpen });
    this.rows = [];
    this.running = null;
    byId("sheet-stop").addEventListener("click", () => this.running?.abort());
    byId("sheet-close").addEventListener("click", () => this.close());
    byId("sheet-csv").addEventListener("click", () => saveBlob(new Blob([this.csv()], { type: "text/csv" }), "contact-sheet.csv"));
  }

  /** Analyze `pairs`, [{image, mask, name}], one after the other. A file that cannot be read is a row with the reason. */
  async open(pairs, skipped) {
    this.running?.abort();
    const mine = new AbortController();
    this.running = mine;
    this.rows = [];
    this.skipped = skipped;
    byId("sheet").hidden = false;
    byId("thumbs").replaceChildren();
    byId("sheet-table").replaceChildren();
    byId("sheet-stop").hidden = false;
    byId("sheet").scrollIntoView({ block: "nearest" });
    for (const pair of pairs) {
      this.tell(pairs.length);
      const row = { pair };
      try {
        await this.fill(row, mine.signal);
      } catch (error) {
        if (mine.signal.aborted) break;
        row.error = error.message;
      }
      if (mine.signal.aborted) break;
      this.rows.push(row);
      byId("thumbs").append(this.thumb(row));
      this.draw(row);
      byId("sheet-table").append(this.tableRow(row));
    }
    if (this.running !== mine) return;
    this.running = null;
    byId("sheet-stop").hidden = true;
    this.tell(pairs.length);
  }

  async fill(row, signal) {
    row.answer = await this.ask(row.pair.image, row.pair.mask, signal);
    const picture = new Image();
    picture.src = row.answer.image.preview;
    await picture.decode();
    URL.revokeObjectURL(picture.src);
    row.answer = { ...row.answer, image: { ...row.answer.image, preview: null } };
    const scale = SIDE / Math.max(picture.naturalWidth, picture.naturalHeight);
    const small = document.createElement("canvas");
    small.width = Math.max(1, Math.round(picture.naturalWidth * scale));
    small.height = Math.max(1, Math.round(picture.naturalHeight * scale));
    const pen = small.getContext("2d");
    pen.imageSmoothingQuality = "high";
    pen.drawImage(picture, 0, 0, small.width, small.height);
    row.scene = { picture: small, grid: row.answer.grid, colors: patchColors(small, row.answer.grid), lesion: lesionMap(row.answer) };
  }

  thumb(row) {
    const item = element("li");
    const button = element("button", "thumb");
    button.type = "button";
    button.addEventListener("click", () => this.onOpen(row.pair));
    row.canvas = element("canvas");
    row.canvas.setAttribute("aria-hidden", "true");
    row.caption = element("span", "quiet");
    if (row.error) button.append(element("span", "broken", "Not read"));
    else button.append(row.canvas);
    button.append(element("span", "name", row.pair.name), row.caption);
    item.append(button);
    return item;
  }

  tell(total) {
    const failed = this.rows.filter((row) => row.error).length;
    const parts = [`${this.rows.length} of ${total} images`];
    if (failed) parts.push(`${failed} could not be read`);
    if (this.skipped) parts.push(`${this.skipped} other ${this.skipped === 1 ? "file" : "files"} left out`);
    byId("sheet-line").textContent = parts.join(" · ");
  }

  close() {
    this.running?.abort();
    this.running = null;
    this.rows = [];
    byId("thumbs").replaceChildren();
    byId("sheet").hidden = true;
  }

  /** Draw everything for the current method and budget; a large sheet when the slider rests. */
  update() {
    clearTimeout(this.later);
    if (this.rows.length > FEW) this.later = setTimeout(() => this.drawAll(), 150);
    else this.drawAll();
  }

  drawAll() {
    for (const row of this.rows) this.draw(row);
    byId("sheet-table").replaceChildren(...this.rows.map((row) => this.tableRow(row)));
  }

  viewOf(row) {
    const { method, stop } = this.choice();
    const selector = row.answer.selectors.find(({ name }) => name === method) ?? row.answer.selectors[0];
    return { selector, view: at(row.answer, selector, stop(row.answer)) };
  }

  draw(row) {
    if (row.error) {
      row.caption.textContent = row.error;
      return;
    }
    const { view } = this.viewOf(row);
    const { picture, lesion } = row.scene;
    row.canvas.width = picture.width;
    row.canvas.height = picture.height;
    paint(row.canvas.getContext("2d"), picture.width, picture.height, row.scene, view, { scores: null, lesion: Boolean(lesion) });
    const parts = [];
    if (view.label !== null) parts.push(`${view.label} ${percent(view.probabilities[view.top])}`);
    if (view.retention !== null) parts.push(`retention ${percent(view.retention)}`);
    row.caption.textContent = parts.join(" · ") || `${view.k} of ${view.n}`;
  }

  tableRow(row) {
    const made = element("tr");
    const head = element("th", "", row.pair.name);
    head.scope = "row";
    made.append(head);
    if (row.error) {
      const cell = element("td", "", row.error);
      cell.colSpan = 5;
      made.append(cell);
      return made;
    }
    const { view } = this.viewOf(row);
    const share = (value) => (value === null ? "–" : percent(value));
    const cells = [`${view.k} of ${view.n}`, view.label ?? "–", share(view.label === null ? null : view.probabilities[view.top]), share(view.retention), share(view.ofCeiling)];
    made.append(...cells.map((text) => element("td", "", text)));
    return made;
  }

  /** The table at the current method and budget, with the probability of every class. */
  csv() {
    const classes = this.rows.find((row) => row.answer)?.answer.classes ?? [];
    const lines = [[...COLUMNS, ...classes.map((name) => `p_${name}`)]];
    const { method, budget } = this.choice();
    for (const row of this.rows) {
      if (row.error) {
        lines.push([row.pair.name, "", "", method, budget, "", "", "", "", "", "", "", row.error, ...classes.map(() => "")]);
        continue;
      }
      const { selector, view } = this.viewOf(row);
      const { width, height } = row.answer.image;
      const top = view.label === null ? ["", ""] : [view.label, view.probabilities[view.top]];
      lines.push([row.pair.name, width, height, selector.name, budget, view.k, view.n, ...top, view.retention, view.ceiling, view.ofCeiling, "", ...view.probabilities]);
    }
    return `${lines.map((line) => line.map(csvField).join(",")).join("\r\n")}\r\n`;
  }
}
