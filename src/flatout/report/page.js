// Draws the plots, in the colours of the page; keeps them together when one is zoomed; copies changes.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("plot-data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const places = () => [...document.querySelectorAll(".plot")];

  // Seconds, minutes or hours: whatever the run is counted in.
  const last = Math.max(1, ...data.panels.flatMap((p) => p.series.map((s) => s.x[s.x.length - 1] || 0)));
  const timed = data.timed; // or counted in steps
  const [unit, seconds] = !timed ? ["", 1] : last > 3 * 3600 ? ["h", 3600] : last > 300 ? ["min", 60] : ["s", 1];

  // No line where nothing was measured: a point without a value in each band that lies between two neighbours.
  const broken = (s) => {
    const x = [], y = [], usual = (s.x[s.x.length - 1] - s.x[0]) / Math.max(1, s.x.length - 1);
    s.x.forEach((at, n) => {
      const between = (m) => m.length_s > 3 * usual && m.start_s + m.length_s / 2 > s.x[n - 1] && m.start_s + m.length_s / 2 < at;
      if (n && at - s.x[n - 1] > 3 * usual && data.marks.some(between)) { x.push((at + s.x[n - 1]) / 2 / seconds); y.push(null); }
      x.push(at / seconds); y.push(s.y[n]);
    });
    return { x, y };
  };
  const traces = (panel) => panel.series.map((s) => ({
    type: "scatter", name: s.name, ...broken(s),
    mode: s.x.length < 3 ? "markers" : "lines",
    line: { color: colour(s.family), width: 1.6, dash: s.dashed ? "dot" : "solid" },
    marker: { color: colour(s.family), size: 7 },
    hovertemplate: "%{y:,.4~g} " + panel.unit.split(" ")[0] + "<extra>" + s.name + "</extra>",
  }));

  // What is not plain training: a band, with its name where there is room for it (in the first plot).
  const bands = () => data.marks.map((m) => ({
    type: "rect", xref: "x", yref: "paper", y0: 0, y1: 1, layer: "below",
    x0: m.start_s / seconds, x1: (m.start_s + m.length_s) / seconds,
    fillcolor: colour("band"), line: { width: m.length_s < last / 400 ? 1 : 0, color: colour("muted"), dash: "dot" },
  }));
  const named = data.marks.filter((m) => m.length_s > last / 30 || data.marks.length < 12);
  const names = () => named.filter((m, n) => !n || m.start_s - named[n - 1].start_s > last / 60).map((m) => ({
    x: (m.start_s + m.length_s / 2) / seconds, y: 1, xref: "x", yref: "paper", yanchor: "bottom", showarrow: false,
    text: m.name, textangle: m.length_s > last / 12 ? 0 : -28, font: { size: 11, color: colour("muted") }, xanchor: m.length_s > last / 12 ? "center" : "left",
  }));

  const layout = (panel, first) => ({
    height: first && data.marks.length ? 236 : 176, margin: { l: 56, r: 12, t: first && data.marks.length ? 68 : 8, b: 36 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "inherit", size: 12, color: colour("muted") },
    showlegend: panel.series.length > 1, legend: { orientation: "h", x: 1, xanchor: "right", y: 1.02, yanchor: "bottom" },
    hovermode: "x unified", hoverlabel: { bgcolor: colour("paper"), bordercolor: colour("line"), font: { color: colour("ink") } },
    xaxis: { gridcolor: colour("line"), zeroline: false, ticksuffix: timed ? " " + unit : "", range: timed ? [0, last / seconds] : undefined,
      ticks: "outside", ticklen: 6, tickcolor: "rgba(0,0,0,0)" },
    yaxis: { gridcolor: colour("line"), zerolinecolor: colour("line"), rangemode: "tozero", nticks: 5, fixedrange: true },
    shapes: bands(), annotations: first ? names() : [],
  });

  const draw = () => places().forEach((div, n) => Plotly.react(
    div, traces(data.panels[n]), layout(data.panels[n], n === 0), { displayModeBar: false, responsive: true }));

  const together = (from) => (change) => {
    if (!timed || from.dataset.following) return;
    const range = change["xaxis.autorange"] ? [0, last / seconds] : [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    if (range[0] === undefined) return;
    places().filter((div) => div !== from).forEach((div) => {
      div.dataset.following = "yes";
      Plotly.relayout(div, { "xaxis.range": range }).then(() => delete div.dataset.following);
    });
  };

  if (data.panels.length) {
    draw();
    places().forEach((div) => div.on("plotly_relayout", together(div)));
    dark.addEventListener("change", draw);
    matchMedia("print").addEventListener("change", draw); // paper is white
  }

  // A folded table does not print: unfold for the paper, fold again after.
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
