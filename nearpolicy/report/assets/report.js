"use strict";
// Draws the charts and samples of the page from its data block. Text from runs is only ever assigned as textContent.
(() => {
  const root = document.documentElement, errors = [];
  const note = (message) => { errors.push(String(message)); root.dataset.errors = JSON.stringify(errors); };
  window.addEventListener("error", (e) => note(e.message));
  window.addEventListener("unhandledrejection", (e) => note(e.reason));
  document.addEventListener("securitypolicyviolation", (e) => note("blocked: " + e.violatedDirective));

  const DATA = JSON.parse(document.getElementById("data").textContent);
  const COLOURS = 8, runs = DATA.runs, shown = runs.map((_, r) => r < COLOURS), HEIGHT = 200;
  const DASHES = [[], [6, 4], [2, 3]], SIGNIFICANT = 4;
  let smoothing = 0.6, live = [];

  const make = (tag, cls, text) => {
    const e = document.createElement(tag);
    if (cls) e.className = cls;
    if (text !== undefined) e.textContent = text;
    return e;
  };
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const colour = (i) => css("--c" + (i % 8));
  const faded = (hex, alpha) => hex + Math.round(alpha * 255).toString(16).padStart(2, "0");
  const figure = (value, unit) => {
    if (value === null || value === undefined) return "–";
    if (unit === "fraction") return +(100 * value).toPrecision(3) + " %";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1);
    return (+value.toPrecision(SIGNIFICANT)).toLocaleString("en");
  };
  const tick = (value, unit) => {
    if (value === null) return "";
    const size = Math.abs(value);
    if (unit === "fraction") return +(100 * value).toPrecision(4) + "%";
    if (size >= 1e9 || (size !== 0 && size < 1e-3)) return value.toExponential(0);
    if (size >= 1e6) return +(value / 1e6).toPrecision(4) + "M";
    return size >= 1e4 ? +(value / 1e3).toPrecision(4) + "k" : String(+value.toPrecision(6));
  };
  const column = (run, name) => {
    const c = name && run.columns[name];
    return c ? [c.x || run.x, c.y] : null;
  };

  // Exponential mean, debiased; a gap (null) stays a gap.
  const smooth = (y, w) => {
    let mean = 0, norm = 0;
    return y.map((v) => {
      if (v === null) return null;
      mean = w * mean + (1 - w) * v; norm = w * norm + (1 - w);
      return mean / norm;
    });
  };

  // ---- line charts ---------------------------------------------------------------------------------------------------------------
  let first = Infinity, last = -Infinity;
  for (const run of runs) for (const c of [{ x: run.x }, ...Object.values(run.columns)]) {
    if (c.x && c.x.length) { first = Math.min(first, c.x[0]); last = Math.max(last, c.x[c.x.length - 1]); }
  }

  // Each table of `join` is one x with its y columns; `series` and `bands` run in parallel with the y columns.
  function linesOf(chart) {
    const tables = [[[first, last]]], series = [{}], bands = [], readouts = [];
    const add = (x, y, options) => { tables.push([x, y]); series.push({ spanGaps: false, points: { show: false }, ...options }); return series.length - 1; };
    runs.forEach((run, r) => {
      if (!shown[r]) return;
      const c = colour(r);
      chart.lines.forEach((line, k) => {
        if (chart.kind === "quantiles") return quantiles(run, r, line, c, add, bands, readouts);
        const col = column(run, line.metric);
        if (!col) return;
        const [x, y] = col, few = x.length <= 40, evaluated = line.metric.startsWith("eval/");
        const low = column(run, line.low), high = column(run, line.high);
        if (low && high) bands.push({ series: [add(high[0], high[1], { stroke: "transparent" }), add(low[0], low[1], { stroke: "transparent" })], fill: faded(c, 0.15) });
        const soft = chart.smooth && !evaluated && x.length > 30 && smoothing > 0;
        if (soft) add(x, y, { stroke: faded(c, 0.28), width: 1 });
        const index = add(x, soft ? smooth(y, smoothing) : y, { stroke: c, width: 1.8, dash: DASHES[k % 3], points: { show: few && k === 0, size: 5, fill: c, stroke: c } });
        readouts.push({ run: r, label: line.label, index: soft ? index - 1 : index });
      });
    });
    return { data: uPlot.join(tables), series, bands, readouts };
  }

  function quantiles(run, r, line, c, add, bands, readouts) {
    const q = (p) => column(run, line.metric + "/" + p);
    const index = {};
    for (const p of ["p99", "p90", "p10", "p01"]) { const col = q(p); if (col) index[p] = add(col[0], col[1], { stroke: faded(c, p === "p90" || p === "p10" ? 0.35 : 0.18), width: 1 }); }
    if (index.p99 && index.p01) bands.push({ series: [index.p99, index.p01], fill: faded(c, 0.1) });
    if (index.p90 && index.p10) bands.push({ series: [index.p90, index.p10], fill: faded(c, 0.2) });
    const mid = q("p50");
    if (mid) readouts.push({ run: r, label: "", index: add(mid[0], mid[1], { stroke: c, width: 1.8 }), range: [index.p10, index.p90] });
  }

  function yScale(chart, data) {
    const values = data.slice(1).flat().filter((v) => v !== null && v !== undefined);
    const low = Math.min(...values), high = Math.max(...values);
    if (chart.log && low > 0 && high / low > 100) return { distr: 3 };
    return {
      range: (u, min, max) => {
        if (min === null || max === null) return [0, 1];
        if (min === max) return min === 0 ? [0, 1] : [Math.min(0, 2 * min), Math.max(0, 2 * max)];
        let [a, b] = uPlot.rangeNum(min, max, 0.08, true);
        if (min >= 0 && a < 0) a = 0;
        if (chart.unit === "fraction" && max <= 1) b = Math.min(b, 1.02);
        return [a, b];
      },
    };
  }

  function axes(unit, xValues) {
    const muted = css("--muted"), grid = { stroke: css("--grid"), width: 1 }, font = "11px system-ui, sans-serif";
    return [
      { stroke: muted, grid: { show: false }, ticks: { stroke: css("--line"), size: 4 }, font, size: 26, gap: 3, space: 60, values: xValues || ((u, v) => v.map((s) => tick(s))) },
      { stroke: muted, grid, ticks: { show: false }, font, size: 46, gap: 4, space: 30, values: (u, v) => v.map((s) => tick(s, unit)) },
    ];
  }

  function draw(box, options, data) {
    const plot = box.querySelector(".plot");
    plot.replaceChildren();
    const chart = new uPlot({ width: Math.max(plot.clientWidth, 160), height: HEIGHT, legend: { show: false }, ...options }, data, plot);
    live.push({ box, chart });
    return chart;
  }

  let zooming = false;
  function zoomAll(source) {
    if (zooming) return;
    zooming = true;
    const { min, max } = source.scales.x;
    for (const { chart } of live) if (chart !== source && chart.steps && min !== null) chart.setScale("x", { min, max });
    zooming = false;
  }

  function alarmLines(u) {
    const g = u.ctx, ratio = devicePixelRatio || 1;
    g.save(); g.lineWidth = ratio; g.setLineDash([3 * ratio, 3 * ratio]); 
    g.beginPath(); g.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height); g.clip();
    runs.forEach((run, r) => {
      g.strokeStyle = faded(runs.length > 1 ? colour(r) : css("--bad"), 0.65);
      if (shown[r]) for (const [step] of run.alarms) {
        const x = Math.round(u.valToPos(step, "x", true));
        g.beginPath(); g.moveTo(x, u.bbox.top); g.lineTo(x, u.bbox.top + u.bbox.height); g.stroke();
      }
    });
    g.restore();
  }

  // The value at the cursor, or the latest before it: metrics of a rollout batch are logged at fewer steps than those of an update.
  const at = (column, index) => { while (index > 0 && column[index] === undefined) index--; return column[index]; };

  function readout(box, u, chart, readouts) {
    const line = box.querySelector(".readout"), index = u.cursor.idx;
    if (index === null || index === undefined) { line.textContent = "\u00a0"; return; }
    line.replaceChildren("step " + u.data[0][index].toLocaleString("en"));
    for (const item of readouts) {
      let text = figure(at(u.data[item.index], index), chart.unit);
      if (item.range && item.range[0]) text += " [" + item.range.map((i) => figure(at(u.data[i], index), chart.unit)).join(", ") + "]";
      const part = make("b", "c" + (item.run % 8), text);
      if (item.label && chart.lines.length > 1) part.title = item.label;
      line.append(part);
    }
    for (const [r, run] of runs.entries()) if (shown[r]) for (const [step, name] of run.alarms) if (step === u.data[0][index]) line.append(make("b", "c5", "⚠ " + name));
  }

  function drawLines(box, chart) {
    const { data, series, bands, readouts } = linesOf(chart);
    const x = first === last ? { time: false, range: [first - 1, last + 1] } : { time: false };
    const u = draw(box, {
      series, bands, axes: axes(chart.unit), scales: { x, y: yScale(chart, data) },
      cursor: { sync: { key: "steps", setSeries: false, scales: ["x", null] }, y: false, drag: { x: true, y: false }, points: { size: 6 } },
      hooks: { draw: [alarmLines], setScale: [(u, key) => key === "x" && zoomAll(u)], setCursor: [(u) => readout(box, u, chart, readouts)] },
    }, data);
    u.steps = true;
    box.onkeydown = (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
      if (!by) return;
      event.preventDefault();
      const xs = u.data[0], next = Math.min(Math.max((u.cursor.idx ?? (by > 0 ? -1 : xs.length)) + by, 0), xs.length - 1);
      u.setCursor({ left: u.valToPos(xs[next], "x"), top: u.over.clientHeight / 2 }, true, true);
    };
  }

  // ---- histograms, heat maps, pass@k -----------------------------------------------------------------------------------------------
  const span = ([a, b]) => (a === b ? "step " + a : "steps " + a + "–" + b);
  const cell = (h, k) => figure(h.borders[k]) + " to " + figure(h.borders[k + 1]);
  const round125 = (v) => { const p = 10 ** Math.floor(Math.log10(v)); return p * [1, 2, 5, 10].find((m) => m * p >= v * 0.999); };
  const histograms = (chart) => runs.map((run, r) => [run.histograms[chart.lines[0].metric], r]).filter(([h, r]) => h && shown[r]);

  function drawHistogram(box, chart) {
    const known = histograms(chart), series = [{}], line = box.querySelector(".readout"), path = uPlot.paths.stepped({ align: 1 });
    if (!known.length) return box.querySelector(".plot").replaceChildren();
    const data = [known[0][0].borders];
    for (const [h, r] of known) {
      const c = colour(r);
      data.push([...h.first, 0], [...h.last, 0]);
      series.push({ stroke: c, width: 1.3, dash: [4, 3], paths: path, points: { show: false } }, { stroke: c, width: 1.8, fill: faded(c, 0.15), paths: path, points: { show: false } });
    }
    const rest = span(known[0][0].first_steps) + " → " + span(known[0][0].last_steps);
    line.textContent = rest;
    draw(box, {
      series, axes: axes("fraction"), scales: { x: { time: false, range: (u, a, b) => [a, b] }, y: { range: (u, a, b) => [0, (b || 1) * 1.08] } }, cursor: { y: false, drag: { x: false } },
      hooks: {
        setCursor: [(u) => {
          const i = u.cursor.idx;
          if (i === null || i === undefined) { line.textContent = rest; return; }
          const k = Math.min(i, data[0].length - 2);
          line.replaceChildren(cell(known[0][0], k), ...known.map(([h, r]) => make("b", "c" + (r % 8), figure(h.first[k], "fraction") + " → " + figure(h.last[k], "fraction"))));
        }],
      },
    }, data);
  }

  function drawHeat(box, chart) {
    const plot = box.querySelector(".plot"), line = box.querySelector(".readout"), known = histograms(chart);
    plot.replaceChildren();
    const height = Math.max(Math.floor((HEIGHT - 8) / Math.max(known.length, 1)) - 18, 48);
    for (const [h, r] of known) {
      const wrap = make("div", "heat"), labels = make("div", "ylabels"), frame = make("div"), canvas = make("canvas"), cells = h.first.length;
      canvas.width = h.heat.length; canvas.height = cells;
      const g = canvas.getContext("2d"), peak = Math.max(...h.heat.flat()), c = colour(r), low = h.borders[0], high = h.borders[cells];
      h.heat.forEach((shares, s) => shares.forEach((share, k) => {
        if (share > 0) { g.fillStyle = faded(c, Math.min(0.06 + 0.94 * Math.sqrt(share / peak), 1)); g.fillRect(s, cells - 1 - k, 1, 1); }
      }));
      frame.style.height = height + "px"; frame.append(canvas);
      const step = round125((high - low) / Math.max(height / 26, 1));
      for (let v = Math.ceil(low / step) * step; v <= high; v += step) {
        const t = make("span", "", tick(Math.abs(v) < step / 1e6 ? 0 : v)); t.style.bottom = (100 * (v - low)) / (high - low) + "%"; labels.append(t);
      }
      const xs = make("div", "xlabels"); xs.append(make("span", "", "step " + h.heat_steps[0][0]), make("span", "", String(h.heat_steps[h.heat_steps.length - 1][1])));
      canvas.onmousemove = (e) => {
        const s = Math.min(Math.floor((e.offsetX / canvas.clientWidth) * h.heat.length), h.heat.length - 1), k = cells - 1 - Math.min(Math.floor((e.offsetY / canvas.clientHeight) * cells), cells - 1);
        if (s >= 0 && k >= 0) line.replaceChildren(span(h.heat_steps[s]) + ", " + cell(h, k), make("b", "c" + (r % 8), figure(h.heat[s][k], "fraction")));
      };
      canvas.onmouseleave = () => { line.textContent = "\u00a0"; };
      wrap.append(labels, frame, xs); plot.append(wrap);
    }
  }

  function drawPassK(box) {
    const tables = [], series = [{}], used = [];
    runs.forEach((run, r) => {
      if (!shown[r]) return;
      const points = Object.entries(run.columns).map(([n, c]) => [/^eval\/pass@(\d+)$/.exec(n), c.y.filter((v) => v !== null).pop()])
        .filter(([m, v]) => m && v !== undefined).map(([m, v]) => [+m[1], v]).sort((a, b) => a[0] - b[0]);
      if (points.length < 2) return;
      tables.push([points.map((p) => p[0]), points.map((p) => p[1])]); used.push(r);
      series.push({ stroke: colour(r), width: 1.8, points: { show: true, size: 6, fill: colour(r), stroke: colour(r) } });
    });
    if (!tables.length) return box.querySelector(".plot").replaceChildren();
    const line = box.querySelector(".readout");
    draw(box, {
      series, axes: axes("fraction", (u, v) => v.map((k) => (u.data[0].includes(k) ? "k = " + k : ""))),
      scales: { x: { time: false, distr: 3, log: 2 }, y: { range: (u, a, b) => [Math.max(a - 0.05, 0), Math.min(b + 0.05, 1.02)] } }, cursor: { y: false, drag: { x: false } },
      hooks: { setCursor: [(u) => {
        const i = u.cursor.idx;
        if (i === null || i === undefined) { line.textContent = "\u00a0"; return; }
        line.replaceChildren("k = " + u.data[0][i], ...used.map((r, s) => make("b", "c" + (r % 8), figure(u.data[s + 1][i], "fraction"))));
      }] },
    }, uPlot.join(tables));
  }

  const KINDS = { lines: drawLines, quantiles: drawLines, histogram: drawHistogram, heatmap: drawHeat, passk: drawPassK };
  const boxes = new Map([...document.querySelectorAll("figure[data-chart]")].map((box) => [box.dataset.chart, box]));
  const render = (chart) => {
    try { KINDS[chart.kind](boxes.get(chart.id), chart); return 1; } catch (error) { note(chart.id + ": " + error.message); return 0; }
  };
  const kit = { runs, shown, make, colour, faded, figure, axes, draw, note, rangeNum: (a, b) => uPlot.rangeNum(a, b, 0.08, true), again: () => renderAll() };
  const renderPositions = window.positionFigures(kit);
  function renderAll() {
    live.forEach(({ chart }) => chart.destroy());
    live = [];
    root.dataset.positions = renderPositions();
    let count = DATA.charts.map(render).reduce((a, b) => a + b, 0);
    const more = document.getElementById("more");
    if (more && more.open) count += DATA.more.map(render).reduce((a, b) => a + b, 0);
    root.dataset.charts = count;
  }

  // ---- samples -----------------------------------------------------------------------------------------------------------------------
  const valueAt = (c, i) => (Array.isArray(c) ? c[i] : c === undefined ? null : c);
  // Weight 1 is neutral, below is cold, above is hot; the scale is log2, full colour at 1/8 and 8.
  const tint = (by, value, range) => {
    if (value === null) return "";
    if (by === "weight") {
      const t = value <= 0 ? -1 : Math.max(-1, Math.min(1, Math.log2(value) / 3));
      return "rgba(var(--" + (t > 0 ? "hot" : "cold") + ")," + (0.55 * Math.abs(t)).toFixed(3) + ")";
    }
    if (by === "logp") return "rgba(var(--hot)," + Math.min(0.6, Math.max(0, -value) / 8).toFixed(3) + ")";
    return range[0] === range[1] ? "" : "rgba(var(--cold)," + (0.1 + 0.5 * (1 - (value - range[0]) / (range[1] - range[0]))).toFixed(3) + ")";
  };

  // Where a relayed response was cut: everything before was kept from an earlier policy's response.
  const versionsOf = (s, from, to) => {
    const own = Array.isArray(s.version) ? s.version.filter((_, i) => { const p = i >= s.head ? i + s.length - s.tokens.length : i; return p >= from && p < to; }) : [s.version];
    const numbers = own.filter((v) => v !== null && v >= 0), low = Math.min(...numbers), high = Math.max(...numbers);
    return numbers.length ? (low === high ? "version " + low : "versions " + low + "–" + high) : "version unknown";
  };
  function boundary(s) {
    const mark = make("span", "cut", "▸");
    mark.title = "relayed here: " + s.prefix_length + " tokens kept (" + versionsOf(s, 0, s.prefix_length) + "), " + (s.length - s.prefix_length) + " written anew (" + versionsOf(s, s.prefix_length, s.length) + ")";
    return mark;
  }

  function sampleCard(s, by) {
    const card = make("article", "sample"), head = make("h3", "", "Step " + s.step.toLocaleString("en")), list = make("dl");
    head.append(make("span", "why", s.why));
    const facts = { reward: s.reward === null ? (s.outcome || "unscored") : figure(s.reward), advantage: figure(s.advantage), stop: s.stop, source: s.source, tokens: s.length, prefix: s.prefix_length || "", group: s.group + "." + s.sample };
    for (const [k, v] of Object.entries(facts)) if (v !== "") { const d = make("div"); d.append(make("dt", "", k), make("dd", "", v)); list.append(d); }
    const body = make("pre", "response"), tail = s.length - s.tokens.length;
    const versions = (Array.isArray(s.version) ? s.version : [s.version]).filter((v) => v !== null);
    const range = [Math.min(...versions), Math.max(...versions)];
    if (s.version !== null) { const d = make("div"); d.append(make("dt", "", "version"), make("dd", "", range[0] === range[1] ? range[0] : range[0] + "–" + range[1])); list.append(d); }
    s.tokens.forEach((token, i) => {
      if (tail && i === s.head) body.append(make("span", "gap", " [… " + tail + " tokens left out …] "));
      const position = i >= s.head ? i + tail : i;
      if (s.prefix_length && position >= s.prefix_length && !body.querySelector(".cut")) body.append(boundary(s));
      const e = make("span", "tok" + (position < s.prefix_length ? " prefix" : ""));
      token.split(/(\n)/).forEach((part) => { if (part === "\n") e.append(make("span", "ws", "⏎"), "\n"); else e.append(part); });
      const value = valueAt(s[by], i);
      e.style.background = tint(by, value, range);
      if (by === "weight" && value !== null && value < 1e-3) e.classList.add("dead");
      e.dataset.tip = JSON.stringify(token) + "\ntoken " + position + " of " + s.length + (position < s.prefix_length ? " (prefix)" : "") + "\nlog-prob " + figure(valueAt(s.logp, i))
        + "\nweight " + figure(valueAt(s.weight, i)) + "\nversion " + figure(valueAt(s.version, i));
      body.append(e);
    });
    if (s.prefix_length && !body.querySelector(".cut")) body.append(boundary(s));
    const parts = s.prefix_length ? [make("p", "relay", body.querySelector(".cut").title)] : [];
    card.append(head, list, ...parts, make("pre", "prompt", s.prompt), body);
    return card;
  }

  const runPick = document.getElementById("sample-run"), byPick = document.getElementById("sample-colour"), list = document.getElementById("sample-list");
  function renderSamples() {
    if (!list) return;
    const run = runs[runPick ? +runPick.value : runs.findIndex((r) => r.samples.length)], by = byPick.value;
    list.replaceChildren(...run.samples.map((s) => sampleCard(s, by)));
    const scale = document.getElementById("sample-scale"), steps = { weight: [0, 0.25, 1, 4, 8], logp: [0, -1, -3, -5], version: [] }[by];
    scale.replaceChildren(...steps.map((v) => { const e = make("span", "", String(v)); e.style.background = tint(by, v, [0, 1]); return e; }));
    if (by === "version") scale.append("darker: older policy");
    if (by === "weight" && run.samples.every((s) => s.weight === null)) scale.replaceChildren("no token weights were recorded");
    if (run.samples.some((s) => s.prefix_length)) { const e = make("span", "tok prefix", "underlined"); scale.append(e, "written by an earlier policy (prefix)", make("span", "cut", "▸"), "relayed here"); }
    root.dataset.samples = run.samples.length;
  }
  const tip = document.getElementById("tip");
  if (list) {
    list.addEventListener("mouseover", (event) => {
      const token = event.target.closest(".tok");
      tip.hidden = !token;
      if (!token) return;
      tip.textContent = token.dataset.tip;
      const at = token.getBoundingClientRect();
      tip.style.left = Math.max(8, Math.min(at.left, innerWidth - tip.offsetWidth - 8)) + "px";
      tip.style.top = (at.bottom + tip.offsetHeight + 10 > innerHeight ? at.top - tip.offsetHeight - 6 : at.bottom + 6) + "px";
    });
    list.addEventListener("mouseleave", () => { tip.hidden = true; });
    byPick.onchange = renderSamples;
    if (runPick) runPick.onchange = renderSamples;
  }

  // ---- controls ------------------------------------------------------------------------------------------------------------------------
  for (const button of document.querySelectorAll("button.run")) button.onclick = () => {
    const r = +button.dataset.run;
    shown[r] = !shown[r];
    button.setAttribute("aria-pressed", shown[r]);
    renderAll();
  };
  let pending = 0;
  const later = (action) => { clearTimeout(pending); pending = setTimeout(action, 120); };
  document.getElementById("smoothing").oninput = (e) => { smoothing = +e.target.value; later(renderAll); };
  document.getElementById("more")?.addEventListener("toggle", renderAll);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", renderAll);
  addEventListener("resize", () => later(() => live.forEach(({ box, chart }) => chart.setSize({ width: Math.max(box.querySelector(".plot").clientWidth, 160), height: HEIGHT }))));

  renderAll();
  renderSamples();
  root.dataset.errors = JSON.stringify(errors);
  root.dataset.milliseconds = Math.round(performance.now());
  root.dataset.ready = "yes";
})();
