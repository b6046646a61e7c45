"use strict";
// Figures by position: curves over the bins with the step as colour, and the same table as a map of step x position. report.js hands its kit over.
window.positionFigures = (kit) => {
  const { runs, shown, make, colour, faded, figure, axes, draw, note } = kit, MAP_HEIGHT = 72;
  const boxes = [...document.querySelectorAll("figure[data-position]")];
  const runPick = document.getElementById("position-run"), axisPick = document.getElementById("position-axis");
  // Early steps are violet and faint to late yellow-green: lightness moves with hue, so that the order reads without colour, too.
  const ramp = (t) => "hsl(" + Math.round(275 - 215 * t) + " 70% " + Math.round(38 + 14 * t) + "%)";
  const chosen = () => {
    if (!runPick) return [runs.findIndex((r) => r.positions.tables)];
    return runPick.value === "all" ? runs.map((_, r) => r).filter((r) => runs[r].positions.tables && shown[r]) : [+runPick.value];
  };
  const tableOf = (run, box, axis) => {
    const name = box.dataset.quantities.split(" ").find((q) => run.positions.tables && run.positions.tables[q + "/" + axis]);
    return name ? run.positions.tables[name + "/" + axis] : null;
  };
  const known = (v) => v !== null && v !== undefined;
  const mean = (rows, k) => { const v = rows.map((r) => r[k]).filter(known); return v.length ? v.reduce((a, b) => a + b, 0) / v.length : null; };

  function curves(box, lines, bins, unit) {
    const x = bins.map((_, k) => k), data = [x, ...lines.map((l) => x.map((k) => (known(l.values[k]) ? l.values[k] : null)))];
    const values = data.slice(1).flat().filter(known), low = Math.min(...values), high = Math.max(...values), line = box.querySelector(".readout");
    const log = box.dataset.position === "raw_weight" && low > 0 && high / low > 100;
    const y = log ? { distr: 3 } : { range: (u, a, b) => (a === b ? [Math.min(0, 2 * a), Math.max(0, 2 * a) || 1] : (([p, q]) => [a >= 0 && p < 0 ? 0 : p, q])(kit.rangeNum(a, b))) };
    draw(box, {
      series: [{}, ...lines.map((l) => ({ stroke: l.stroke, width: l.width, spanGaps: true, points: { show: bins.length < 3, size: 5 } }))],
      axes: axes(unit, (u, v) => v.map((k) => (Number.isInteger(k) && bins[k] ? bins[k].split("–")[0] : ""))),
      scales: { x: { time: false, range: (u, a, b) => [a - 0.15, b + 0.15] }, y }, cursor: { y: false, drag: { x: false } },
      hooks: { setCursor: [(u) => {
        const k = u.cursor.idx;
        if (!known(k)) { line.textContent = "\u00a0"; return; }
        const named = lines.filter((l) => l.name);
        line.replaceChildren(bins[k], ...named.map((l) => { const b = make("b", l.cls || "", figure(l.values[k], unit)); b.title = l.name; if (!l.cls) b.style.color = l.stroke; return b; }));
      }] },
    }, data);
  }

  function map(box, steps, table, bins, unit, c) {
    const frame = box.querySelector(".map"), line = box.querySelector(".readout"), canvas = make("canvas"), wrap = make("div", "heat"), labels = make("div", "ylabels");
    const values = table.flat().filter(known), log = box.dataset.position === "raw_weight" && Math.min(...values) > 0;
    const of = (v) => (log ? Math.log(v) : v), low = of(Math.min(...values)), high = of(Math.max(...values));
    canvas.width = steps.length; canvas.height = bins.length;
    const g = canvas.getContext("2d");
    table.forEach((row, s) => bins.forEach((_, k) => {
      if (!known(row[k])) return;
      g.fillStyle = faded(c, high > low ? 0.06 + 0.94 * ((of(row[k]) - low) / (high - low)) : 0.5);
      g.fillRect(s, bins.length - 1 - k, 1, 1);
    }));
    const inner = make("div"); inner.style.height = MAP_HEIGHT + "px"; inner.append(canvas);
    for (const [k, at] of [[0, 0], [bins.length - 1, 100]]) { const t = make("span", "", bins[k].split("–")[0]); t.style.bottom = at + "%"; t.style.transform = at ? "translateY(100%)" : "none"; labels.append(t); }
    const xs = make("div", "xlabels"); xs.append(make("span", "", "step " + steps[0]), make("span", "", String(steps[steps.length - 1])));
    canvas.onmousemove = (e) => {
      const s = Math.min(Math.floor((e.offsetX / canvas.clientWidth) * steps.length), steps.length - 1), k = bins.length - 1 - Math.min(Math.floor((e.offsetY / canvas.clientHeight) * bins.length), bins.length - 1);
      if (s >= 0 && k >= 0) line.replaceChildren("step " + steps[s] + ", " + bins[k], make("b", "", figure(table[s][k], unit)));
    };
    canvas.onmouseleave = () => { line.textContent = "\u00a0"; };
    wrap.append(labels, inner, xs); frame.replaceChildren(wrap);
  }

  function drawOne(box, axis, picked) {
    const unit = box.dataset.unit, own = picked.map((r) => [r, tableOf(runs[r], box, axis)]).filter(([, t]) => t);
    box.querySelector(".plot").replaceChildren(); box.querySelector(".map").replaceChildren();
    box.hidden = !own.length;
    if (!own.length) return 0;
    const bins = own.map(([r]) => runs[r].positions.bins[axis]).reduce((a, b) => (b.length > a.length ? b : a));
    if (runPick && runPick.value === "all") {
      curves(box, own.map(([r, table]) => {
        const rows = table.slice(-Math.max(Math.ceil(table.length / 10), 1));
        return { stroke: colour(r), width: 1.8, cls: "c" + (r % 8), name: runs[r].name, values: bins.map((_, k) => mean(rows, k)) };
      }), bins, unit);
      return 1;
    }
    const [r, table] = own[0], steps = runs[r].positions.steps, n = table.length;
    const lines = table.map((values, s) => ({ stroke: ramp(n > 1 ? s / (n - 1) : 1), width: s === n - 1 ? 2 : 1.1, values, name: s === 0 || s === n - 1 ? "step " + steps[s] : "" }));
    curves(box, lines, bins, unit);
    map(box, steps, table, bins, unit, colour(r));
    return 1;
  }

  function render() {
    if (!boxes.length) return 0;
    const picked = chosen(), axis = axisPick.value, scale = document.getElementById("position-scale");
    let count = 0;
    for (const box of boxes) try { count += drawOne(box, axis, picked); } catch (error) { note(box.dataset.position + " by position: " + error.message); }
    const steps = picked.length === 1 && runs[picked[0]].positions.steps;
    if (steps && !(runPick && runPick.value === "all")) {
      const bar = make("i", "ramp"); bar.style.background = "linear-gradient(90deg," + [0, 0.25, 0.5, 0.75, 1].map(ramp).join(",") + ")";
      scale.replaceChildren("step " + steps[0], bar, String(steps[steps.length - 1]));
    } else scale.replaceChildren("each run: mean of the last tenth of its rows");
    return count;
  }
  for (const pick of [runPick, axisPick]) if (pick) pick.onchange = kit.again;
  return render;
};
