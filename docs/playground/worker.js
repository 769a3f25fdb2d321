// The worker: Python in WebAssembly, so that typing never waits for an answer.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const ready = (async () => {
  const [python, archive] = await Promise.all([
    loadPyodide({ indexURL: new URL("./pyodide/", import.meta.url).href }),
    fetch(new URL("./ptrain.zip", import.meta.url)).then((reply) => reply.arrayBuffer()),
  ]);
  python.unpackArchive(archive, "zip", { extractDir: "/lib/ptrain" });
  python.runPython("import sys; sys.path.insert(0, '/lib/ptrain'); import answer");
  return python.pyimport("answer");
})();

self.onmessage = async ({ data: { id, question, text, columns, width } }) => {
  try {
    const watch = (done, count) => self.postMessage({ id, progress: `${done} of ${count}` });
    const module = await ready;
    const started = performance.now();
    const result = JSON.parse(module.answer(question, text, columns, width, watch));
    self.postMessage({ id, result, seconds: (performance.now() - started) / 1000 });
  } catch (error) {
    self.postMessage({ id, result: { faults: [{ place: "", finding: String(error) }] } });
  }
};
