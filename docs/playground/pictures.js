// The pictures, as SVG. Figures, colours and texts come from Python.

function make(name, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

const svg = (width, height, label, ...children) =>
  make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, ...children);

/** Return the bar of one rank's memory by state, with a line at the usable memory. */
export function memoryPicture({ parts, peak, peak_text, usable, usable_text, fits }, width) {
  const sum = parts.reduce((total, part) => total + part.bytes, 0);
  const scale = (width - 2) / (Math.max(sum, peak, usable ?? 0, 1) * 1.02);
  const [top, tall] = [22, 40];
  const nodes = [];
  let x = 1;
  for (const part of parts) {
    const title = make("title", {}, `${part.name} ${part.text}`);
    const box = { x, y: top, width: part.bytes * scale, height: tall, fill: part.colour };
    nodes.push(make("rect", box, title));
    x += part.bytes * scale;
  }
  if (usable) {
    const at = 1 + usable * scale;
    const anchor = at > width / 2 ? "end" : "start";
    nodes.push(make("line", { x1: at, x2: at, y1: top - 6, y2: top + tall + 6, class: "limit" }));
    nodes.push(make("text", { x: at, y: 12, "text-anchor": anchor }, `usable ${usable_text}`));
  }
  if (peak) {
    const at = 1 + peak * scale;
    const anchor = at > width / 2 ? "end" : "start";
    const y = top + tall;
    nodes.push(make("path", { d: `M${at} ${y + 1}l-5 9h10z`, class: fits === false ? "bad" : "peak" }));
    nodes.push(make("text", { x: at, y: y + 23, "text-anchor": anchor }, `peak ${peak_text}`));
  }
  const label = `peak ${peak_text} of ${usable_text} per rank`;
  return svg(width, top + tall + 30, label, ...nodes);
}

/** Return the part of each state that each of the first ranks keeps. */
export function placementPicture({ axes, states }, width) {
  const ranks = axes.length ? axes[0].places.length : 1;
  const [head, row, gap] = [24, 26, 10];
  const names = Array.from({ length: ranks }, (_, rank) =>
    width < 600 ? `${rank}` : `rank ${rank}  ${axes.map((axis) => `${axis.axis} ${axis.places[rank]}`).join(" ")}`,
  );
  const left = Math.max(...names.map((name) => name.length)) * 7.2 + 12;
  const column = (width - left) / states.length;
  const nodes = names.map((name, rank) => make("text", { x: 0, y: head + rank * row + 15 }, name));
  states.forEach((state, index) => {
    const x = left + index * column;
    nodes.push(make("text", { x, y: 14, class: "name" }, state.state));
    for (let rank = 0; rank < ranks; rank++) {
      const box = { x, y: head + rank * row, width: column - gap, height: row - 6 };
      nodes.push(make("rect", { ...box, class: state.is_gathered ? "frame gathered" : "frame" }));
      if (state.parts.length) {
        const [start, size] = state.parts[rank];
        const part = { ...box, x: x + start * box.width, width: Math.max(1.5, size * box.width), fill: state.colour };
        nodes.push(make("rect", state.is_offloaded ? { ...part, class: "offloaded" } : part));
      }
    }
  });
  return svg(width, head + ranks * row, "parts of the states by rank", ...nodes);
}

/** Return a drawing of ptrain (a schedule, or token shards), whose lengths are in points. */
export function sheetPicture(sheet) {
  const anchors = { left: "start", center: "middle", right: "end" };
  const boxes = sheet.rectangles.map(({ x, y, width, height, colour, edge, edge_width }) =>
    make("rect", { x, y, width, height, fill: colour, stroke: edge, "stroke-width": edge_width }),
  );
  const texts = sheet.texts.map((label) =>
    make(
      "text",
      {
        x: label.x,
        y: label.y,
        fill: label.colour,
        "font-size": label.size,
        "font-weight": label.is_bold ? 700 : 400,
        "text-anchor": anchors[label.align],
        "dominant-baseline": "central",
      },
      label.text,
    ),
  );
  const node = svg(sheet.width, sheet.height, sheet.title, ...boxes, ...texts);
  node.setAttribute("class", "sheet");
  return node;
}
