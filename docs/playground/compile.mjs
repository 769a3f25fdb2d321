// Compile the Python files of a folder with the Python of Pyodide, and delete their text: node compile.mjs
// PYODIDE FOLDER. A browser would compile them at each visit, which takes half of the time to the first figure.
import { pathToFileURL } from "node:url";

const [pyodide, folder] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(`${pyodide}/pyodide.mjs`));
const python = await loadPyodide();
python.FS.mkdir("/files");
python.FS.mount(python.FS.filesystems.NODEFS, { root: folder }, "/files");
python.runPython(`
import compileall, pathlib, py_compile
mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
assert compileall.compile_dir("/files", quiet=1, legacy=True, invalidation_mode=mode)
for file in pathlib.Path("/files").rglob("*.py"):
    file.unlink()
`);
process.exit(0); // Pyodide keeps node alive
