// The editor: a text area over a page with the same lines, on which errors are marked, and completion
// of keys and values. `keys` maps a dotted key to its words and its meaning.

const KEY = /^( *)([\w*]+):/;

/** Return the keys above the caret, the word before it, and whether a value is written. */
export function contextAt(text, caret) {
  const lines = text.slice(0, caret).split("\n");
  const line = lines.pop();
  if (line.includes("#")) return null;
  let above = [];
  for (const [, space, key] of lines.map((before) => KEY.exec(before)).filter(Boolean)) {
    above = above.filter((outer) => outer.indent < space.length);
    above.push({ indent: space.length, key });
  }
  const indent = /^ */.exec(line)[0].length;
  const path = above.filter((outer) => outer.indent < indent).map((outer) => outer.key);
  let word = "";
  let key = null;
  for (const letter of line.slice(indent)) {
    if (letter === ":") [key, word] = [word, ""];
    else if (letter === "{") (path.push(key), ([key, word] = [null, ""]));
    else if (letter === "}") (path.pop(), ([key, word] = [null, ""]));
    else if (letter === ",") [key, word] = [null, ""];
    else if (letter !== " " || word) word += letter;
  }
  return { path: key === null ? path : [...path, key], word, isValue: key !== null };
}

/** Return the words that may be written at a place, those that begin with the word first. */
export function suggestions(keys, { path, word, isValue }) {
  const place = path.join(".");
  let found = [];
  if (isValue) found = (keys[place]?.values ?? []).map((value) => ({ text: value }));
  else {
    const start = place && `${place}.`;
    for (const [key, { meaning }] of Object.entries(keys)) {
      const last = key.slice(start.length);
      if (key.startsWith(start) && !last.includes(".")) found.push({ text: last, meaning });
    }
  }
  const fits = (row) => row.text.startsWith(word) && row.text !== word;
  return found.filter(fits).slice(0, 40);
}

export class Editor {
  constructor(root, keys, onChange) {
    Object.assign(this, { keys, onChange, rows: [], chosen: 0, faults: [] });
    [this.area, this.page, this.list] = ["textarea", ".page", ".words"].map((name) =>
      root.querySelector(name),
    );
    this.area.addEventListener("input", () => this.changed(true));
    this.area.addEventListener("scroll", () => this.scroll());
    this.area.addEventListener("blur", () => setTimeout(() => this.close(), 200));
    this.area.addEventListener("click", () => this.close());
    this.area.addEventListener("keydown", (event) => this.press(event));
    this.list.addEventListener("pointerdown", (event) => {
      event.preventDefault(); // the text area keeps the focus
      const row = event.target.closest("li");
      if (row) this.accept(Number(row.dataset.row));
    });
  }

  get text() {
    return this.area.value;
  }

  set text(text) {
    this.area.value = text;
    this.changed(false);
  }

  changed(isTyped) {
    this.faults = [];
    this.draw();
    if (isTyped) this.suggest(false);
    this.onChange();
  }

  /** Mark the lines of the faults, with their finding behind the line. */
  mark(faults) {
    this.faults = faults;
    this.draw();
  }

  draw() {
    const byLine = new Map(this.faults.map((fault) => [fault.line, fault.finding]));
    const rows = this.text.split("\n").map((line, index) => {
      const row = document.createElement("div");
      row.textContent = line || "\u200b";
      if (byLine.has(index + 1)) {
        row.className = "wrong";
        row.dataset.finding = byLine.get(index + 1);
      }
      return row;
    });
    this.page.replaceChildren(...rows);
    this.area.setAttribute("aria-invalid", String(this.faults.length > 0));
    this.scroll();
  }

  scroll() {
    this.page.style.transform = `translate(${-this.area.scrollLeft}px, ${-this.area.scrollTop}px)`;
  }

  suggest(isAsked) {
    const context = contextAt(this.text, this.area.selectionStart);
    const rows = context && (context.word || isAsked || context.isValue);
    this.rows = rows ? suggestions(this.keys, context) : [];
    if (!this.rows.length) return this.close();
    this.chosen = 0;
    this.context = context;
    this.showList();
  }

  showList() {
    const before = this.text.slice(0, this.area.selectionStart).split("\n");
    const style = getComputedStyle(this.area);
    const letter = this.area.ownerDocument.createElement("canvas").getContext("2d");
    letter.font = style.font;
    const [left, top] = [parseFloat(style.paddingLeft), parseFloat(style.paddingTop)];
    const x = left + letter.measureText("x").width * before.at(-1).length - this.area.scrollLeft;
    const y = top + parseFloat(style.lineHeight) * before.length - this.area.scrollTop;
    this.list.replaceChildren(
      ...this.rows.map((row, index) => {
        const item = document.createElement("li");
        item.dataset.row = index;
        item.role = "option";
        item.ariaSelected = String(index === this.chosen);
        item.append(Object.assign(document.createElement("b"), { textContent: row.text }));
        if (row.meaning) item.append(` ${row.meaning}`);
        return item;
      }),
    );
    this.list.hidden = false;
    const room = this.area.clientWidth - this.list.offsetWidth;
    this.list.style.left = `${Math.max(0, Math.min(x, room))}px`;
    this.list.style.top = `${y}px`;
    this.list.children[this.chosen].scrollIntoView({ block: "nearest" });
  }

  close() {
    this.rows = [];
    this.list.hidden = true;
  }

  press(event) {
    if (event.ctrlKey && event.key === " ") {
      event.preventDefault();
      return this.suggest(true);
    }
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!this.rows.length) return;
    if (step) {
      this.chosen = (this.chosen + step + this.rows.length) % this.rows.length;
      this.showList();
    } else if (event.key === "Enter" || event.key === "Tab") this.accept(this.chosen);
    else if (event.key === "Escape") this.close();
    else return;
    event.preventDefault();
  }

  accept(number) {
    const { word, isValue } = this.context;
    const end = this.area.selectionStart;
    const text = this.rows[number].text + (isValue ? "" : ": ");
    this.area.setRangeText(text, end - word.length, end, "end");
    this.area.focus();
    this.changed(false);
    this.close();
  }
}
