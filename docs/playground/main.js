// The page: asks the worker after each change, and shows the answers. The spec is in the link.
import { Editor } from "./editor.js";

const PAUSE = 250; // ms after the last key, before the worker is asked
const SEARCH_PAUSE = 1000; // a search takes seconds
const at = (id) => document.getElementById(id);

/** A worker that answers one question at a time; of the waiting ones only the newest is kept. */
class Engine {
  constructor(question, { isRestarted, show, watch }) {
    Object.assign(this, { question, isRestarted, show, watch, id: 0, isBusy: false, next: null });
  }

  ask(text) {
    if (this.isBusy && this.isRestarted) this.stop(); // its answer would come too late
    if (this.isBusy) return void (this.next = text);
    this.worker ??= this.start();
    this.isBusy = true;
    this.worker.postMessage({ id: ++this.id, question: this.question, text, columns: columns(), width: width() });
  }

  start() {
    const worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
    worker.onmessage = ({ data }) => {
      if (data.progress) return this.watch?.(data.progress);
      this.isBusy = false;
      const next = this.next;
      this.next = null;
      if (next === null) this.show(data.result, data.seconds);
      else this.ask(next);
    };
    worker.onerror = (event) => this.show({ faults: [{ place: "", finding: event.message || "the worker cannot start" }] });
    return worker;
  }

  stop() {
    this.worker.terminate();
    Object.assign(this, { worker: null, isBusy: false, next: null });
  }
}

const columns = () => Math.max(40, Math.floor((at("answers").clientWidth - 24) / 7.9));
const width = () => Math.floor(at("answers").clientWidth * 0.75); // points
const contents = await fetch(new URL("./contents.json", import.meta.url)).then((reply) => reply.json());
const predictor = new Engine("predict", { isRestarted: false, show: showPrediction });
const searcher = new Engine("select", {
  isRestarted: true,
  show: showRanking,
  watch: (progress) => (at("select").textContent = `Searching: ${progress} candidates derived …`),
});
let timer = 0;
let searchTimer = 0;
let resizeTimer = 0;
let askedWidth = 0;
const editor = new Editor(at("editor"), contents.keys, () => {
  clearTimeout(timer);
  timer = setTimeout(changed, PAUSE);
});

function changed() {
  history.replaceState(null, "", `#spec=${encodeURIComponent(editor.text)}`);
  at("state").textContent = "…";
  predict();
  search();
}

function predict() {
  askedWidth = width();
  predictor.ask(editor.text);
}

function search() {
  clearTimeout(searchTimer);
  if (at("select").hidden) return;
  at("select").textContent = "Searching all placements; this takes up to a minute …";
  searchTimer = setTimeout(() => searcher.ask(editor.text), SEARCH_PAUSE);
}

function showFaults(faults) {
  editor.mark(faults.filter((fault) => fault.line));
  at("faults").replaceChildren(
    ...faults.map(({ line, place, finding, remedy }) => {
      const item = document.createElement("li");
      const where = [line && `line ${line}`, place].filter(Boolean).join(": ");
      item.textContent = [where, finding].filter(Boolean).join(": ");
      if (remedy) item.append(Object.assign(document.createElement("p"), { textContent: remedy }));
      return item;
    }),
  );
}

function showPrediction(result, seconds) {
  document.body.dataset.seconds = seconds; // for check.mjs
  showFaults(result.faults ?? []);
  document.body.classList.toggle("old", Boolean(result.faults));
  if (result.faults) return void (at("state").textContent = "This spec has errors.");
  const [title, verdict] = result.headline;
  at("state").replaceChildren(Object.assign(document.createElement("b"), { textContent: verdict }), ` ${title}`);
  at("state").dataset.fits = String(result.record.fit.fits);
  for (const name of ["predict", "plan"]) at(`${name}-text`).textContent = result[name];
  // SVG by ptrain, in which names of the spec are escaped.
  for (const [name, picture] of Object.entries(result.pictures)) at(`${name}-picture`).innerHTML = picture;
}

function showRanking(result) {
  at("select").textContent = result.select ?? "Correct the errors first, or add a cluster to search.";
  if (result.faults) at("select").textContent = result.faults.map((fault) => `${fault.place}: ${fault.finding}\n${fault.remedy}`).join("\n");
}

function openTab(name) {
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const isOpen = tab.dataset.panel === name;
    tab.ariaSelected = String(isOpen);
    at(tab.dataset.panel).hidden = !isOpen;
  }
  search();
}

function textOfLink() {
  const [, text] = /^#spec=(.*)$/.exec(location.hash) ?? [];
  return text === undefined ? contents.specs[contents.first] : decodeURIComponent(text);
}

at("examples").append(...Object.keys(contents.specs).map((name) => new Option(name)));
at("examples").addEventListener("change", ({ target }) => {
  editor.text = contents.specs[target.value];
  target.selectedIndex = 0; // the text may be changed, so no name is shown
});
at("link").addEventListener("click", async () => {
  await navigator.clipboard.writeText(location.href);
  at("link").textContent = "Copied";
  setTimeout(() => (at("link").textContent = "Copy link"), 1500);
});
at("tabs").addEventListener("click", ({ target }) => target.dataset.panel && openTab(target.dataset.panel));
addEventListener("hashchange", () => textOfLink() !== editor.text && (editor.text = textOfLink()));
// Pictures are drawn for the width of the page.
new ResizeObserver(() => {
  if (!askedWidth || width() === askedWidth) return;
  clearTimeout(resizeTimer);
  resizeTimer = setTimeout(predict, PAUSE);
}).observe(at("answers"));
editor.text = textOfLink();
