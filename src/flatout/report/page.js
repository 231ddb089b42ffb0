// Zooms and moves the charts, reads values from them, and copies changes. All drawing was done by Python.
(() => {
  "use strict";
  const SIZE = 10000; // what a plot measures inside, each way
  const KEYS = { ArrowLeft: -1, ArrowRight: 1 };
  const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
  const brief = (value, digits) => value.toLocaleString("en", { maximumSignificantDigits: digits });

  // A line's points from its path: absolute after M, relative after l.
  const points = (path) => {
    if (path.points) return path.points;
    path.points = [];
    let x = 0, y = 0;
    for (const [, kind, text] of path.getAttribute("d").matchAll(/([Ml])([^Ml]*)/g)) {
      const numbers = text.match(/-?\d+/g).map(Number);
      for (let n = 0; n + 1 < numbers.length; n += 2) {
        x = numbers[n] + (kind === "l" ? x : 0);
        y = numbers[n + 1] + (kind === "l" ? y : 0);
        path.points.push([x, y]);
      }
    }
    return path.points;
  };

  // What the lines of a plot say at a place of the x axis.
  const values = (lines, at) => [...lines.querySelectorAll("[data-name]")].map((path) => {
    const [, y] = points(path).reduce((best, p) => Math.abs(p[0] - at) < Math.abs(best[0] - at) ? p : best);
    const { low, high } = lines.dataset;
    return path.dataset.name + " " + brief(Number(low) + (1 - y / SIZE) * (high - low), 4);
  }).join(", ");

  const makeZoomable = (group) => {
    let from = 0, to = 1, cursor = null, drag = null; // shares of the whole axis
    const { start, end, unit } = group.dataset;
    const label = (share) => brief(Number(start) + share * (end - start), 3) + (unit ? " " + unit : "");
    const lines = [...group.querySelectorAll(".lines")];
    lines.forEach((svg) => {
      svg.cursor = svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "path"));
      svg.cursor.setAttribute("class", "cursor");
    });

    const show = () => {
      const width = to - from;
      lines.forEach((svg) => svg.setAttribute("viewBox", `${from * SIZE} 0 ${width * SIZE} ${SIZE}`));
      group.querySelectorAll(".inner").forEach((svg) => {
        svg.setAttribute("x", `${-100 * from / width}%`);
        svg.setAttribute("width", `${100 / width}%`);
      });
      group.querySelectorAll(".axis").forEach((axis) => [...axis.children].forEach((tick, place, all) => {
        tick.textContent = label(from + width * place / (all.length - 1));
      }));
    };
    const zoom = (first, last) => {
      const width = clamp(last - first, 1e-3, 1);
      from = clamp(first, 0, 1 - width);
      to = from + width;
      show();
    };
    const read = () => lines.forEach((svg) => {
      const output = svg.closest("figure").querySelector("output");
      svg.cursor.setAttribute("d", cursor === null ? "" : `M${cursor * SIZE} 0v${SIZE}`);
      output.textContent = cursor === null ? "" : `${label(cursor)}: ${values(svg, cursor * SIZE)}`;
    });

    group.querySelectorAll(".frame").forEach((frame) => {
      const surface = frame.querySelector("svg");
      const share = (event) => {
        const box = surface.getBoundingClientRect();
        return from + (to - from) * clamp((event.clientX - box.left) / box.width, 0, 1);
      };
      const box = frame.appendChild(document.createElement("div"));
      box.className = "drag";
      box.hidden = true;
      frame.addEventListener("pointerdown", (event) => {
        if (event.button !== 0 || event.pointerType === "touch") return;
        drag = { at: share(event), from, to, moves: event.shiftKey };
        frame.setPointerCapture(event.pointerId);
      });
      frame.addEventListener("pointermove", (event) => {
        cursor = share(event);
        read();
        if (drag && drag.moves) {
          const by = drag.at - cursor;
          zoom(from + by, to + by);
        } else if (drag) {
          const within = (at) => surface.getBoundingClientRect().left - frame.getBoundingClientRect().left
            + surface.getBoundingClientRect().width * (at - from) / (to - from);
          const [left, right] = [within(Math.min(drag.at, cursor)), within(Math.max(drag.at, cursor))];
          Object.assign(box.style, { left: left + "px", width: right - left + "px" });
          box.hidden = false;
        }
      });
      frame.addEventListener("pointerup", (event) => {
        const [first, last] = drag ? [drag.at, share(event)].sort((a, b) => a - b) : [0, 0];
        if (drag && !drag.moves && last - first > 0.01 * (to - from)) zoom(first, last);
        drag = null;
        box.hidden = true;
      });
      frame.addEventListener("pointerleave", () => { if (!drag) { cursor = null; read(); } });
      frame.addEventListener("dblclick", () => zoom(0, 1));
      frame.addEventListener("keydown", (event) => {
        const width = to - from, at = cursor === null ? (from + to) / 2 : cursor;
        if (event.ctrlKey || event.metaKey || event.altKey) return;
        if (event.key in KEYS && event.shiftKey) zoom(from + KEYS[event.key] * width / 10, to + KEYS[event.key] * width / 10);
        else if (event.key in KEYS) cursor = clamp(at + KEYS[event.key] * width / 100, from, to);
        else if (event.key === "+" || event.key === "=") zoom(at - width / 4, at + width / 4);
        else if (event.key === "-") zoom(at - width, at + width);
        else if (event.key === "0" || event.key === "Escape") { cursor = null; zoom(0, 1); }
        else return;
        event.preventDefault();
        read();
      });
    });
  };
  document.querySelectorAll(".zoom").forEach(makeZoomable);

  // Evidence prints: unfold it for the paper, fold it again after.
  let unfolded = [];
  addEventListener("beforeprint", () => {
    unfolded = [...document.querySelectorAll(".finding details:not([open])")];
    unfolded.forEach((d) => { d.open = true; });
  });
  addEventListener("afterprint", () => unfolded.forEach((d) => { d.open = false; }));

  document.querySelectorAll("button[data-copy]").forEach((button) => button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(button.dataset.copy);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(button.parentElement.querySelector("code"));
      button.textContent = "Press Ctrl+C";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  }));
})();
