"use strict";
(() => {
  const d = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const scaled = (n) => {
    let u = 0, x = n;
    while (x >= 1024 && u + 1 < units.length) { x /= 1024; u++; }
    return [x, u];
  };
  const bytes = (n) => {
    const [x, u] = scaled(n);
    return (u === 0 ? n : x < 9.995 ? x.toFixed(2) : x < 99.95 ? x.toFixed(1) : x.toFixed(0)) + " " + units[u];
  };
  const micros = (x) => x >= 1e6 ? (x / 1e6).toFixed(2) + " s" : x >= 1e3 ? (x / 1e3).toFixed(2) + " ms" : x.toFixed(2) + " µs";
  const el = (tag, text, cls) => {
    const e = document.createElement(tag);
    if (text !== undefined) e.textContent = text;
    if (cls) e.className = cls;
    return e;
  };
  const row = (...cells) => { const r = el("tr"); r.append(...cells); return r; };
  const TEMP = d.kinds.length - 1;

  // Memory by kind at every step of a schedule, from the storages held.
  const unpack = (m) => {
    const n = m.s.length;
    const kinds = d.kinds.map(() => new Float64Array(n + 1));
    for (let i = 0; i < m.t.v.length; i++) {
      kinds[m.t.k[i]][m.t.f[i]] += m.t.b[i];
      kinds[m.t.k[i]][m.t.e[i]] -= m.t.b[i];
    }
    const total = new Float64Array(n);
    for (const k of kinds) for (let s = 1; s < n; s++) k[s] += k[s - 1];
    for (const [s, b] of m.m) kinds[TEMP][s] += b;
    for (const k of kinds) for (let s = 0; s < n; s++) total[s] += k[s];
    const seen = new Uint8Array(d.ops.n.length);
    const again = new Uint8Array(n);
    m.s.forEach((o, s) => { again[s] = seen[o]; seen[o] = 1; });
    let peak = 0;
    for (let s = 1; s < n; s++) if (total[s] > total[peak]) peak = s;
    return { ...m, n, kinds, total, again, peak };
  };
  const after = unpack(d.after), before = unpack(d.before);
  // The unplanned step at the nodes of the planned one: a copy stays where the last node was.
  const twin = new Int32Array(after.n);
  const stepOf = new Map(before.s.map((o, s) => [o, s]));
  for (let s = 0, last = 0; s < after.n; s++) { if (!after.again[s] && stepOf.has(after.s[s])) last = stepOf.get(after.s[s]); twin[s] = last; }
  const time = new Float64Array(after.n + 1);
  for (let s = 0; s < after.n; s++) time[s + 1] = time[s] + d.ops.us[after.s[s]];

  const heldAt = (m, s) => {
    const list = [];
    for (let i = 0; i < m.t.v.length; i++)
      if (m.t.f[i] <= s && s < m.t.e[i]) list.push({ name: d.names[m.t.v[i]], kind: m.t.k[i], layer: m.t.l[i], bytes: m.t.b[i] });
    if (m.n && m.kinds[TEMP][s]) list.push({ name: "inside " + d.ops.n[m.s[s]], kind: TEMP, layer: -1, bytes: m.kinds[TEMP][s] });
    return list.sort((a, b) => b.bytes - a.bytes);
  };
  const key = (k) => { const e = el("span", undefined, "key"); e.style.background = "var(--k" + k + ")"; return e; };

  // The picture of memory.
  const canvas = $("memory"), slider = $("cursor");
  // Kinds that neither step ever holds are not shown.
  const used = d.kinds.map((_, k) => k).filter((k) => [after, before].some((m) => m.kinds[k].some((b) => b > 0)));
  let cursor = after.peak;
  slider.max = Math.max(0, after.n - 1);
  const pad = { left: 74, right: 12, top: 38, bottom: 26 };
  const byTime = () => $("axis").value === "time" && time[after.n] > 0;
  const positionOf = (s) => byTime() ? time[s] / time[after.n] : s / Math.max(1, after.n);
  const stepAt = (x) => {
    if (!byTime()) return Math.min(after.n - 1, Math.max(0, Math.floor(x * after.n)));
    const wanted = x * time[after.n];
    let low = 0, high = after.n - 1;
    while (low < high) { const mid = (low + high + 1) >> 1; if (time[mid] <= wanted) low = mid; else high = mid - 1; }
    return low;
  };
  const draw = () => {
    const w = canvas.clientWidth, h = canvas.clientHeight, dpr = window.devicePixelRatio || 1;
    canvas.width = Math.round(w * dpr); canvas.height = Math.round(h * dpr);
    const c = canvas.getContext("2d");
    c.scale(dpr, dpr); c.clearRect(0, 0, w, h);
    c.font = "12px system-ui, sans-serif"; c.textBaseline = "middle";
    if (!after.n) return;
    const width = w - pad.left - pad.right, height = h - pad.top - pad.bottom;
    const most = Math.max(after.total[after.peak], before.total[before.peak], d.budget || 0, 1) * 1.04;
    const y = (b) => pad.top + height * (1 - b / most);
    const [, unit] = scaled(most);
    const size = most / 1024 ** unit;
    const rough = size / 5, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
    c.fillStyle = css("--soft"); c.strokeStyle = css("--line"); c.lineWidth = 1;
    c.textAlign = "right";
    for (let t = 0; t <= size; t += step) {
      const at = y(t * 1024 ** unit);
      c.beginPath(); c.moveTo(pad.left, at); c.lineTo(w - pad.right, at); c.stroke();
      c.fillText(+t.toPrecision(4) + " " + units[unit], pad.left - 8, at);
    }
    // One column a pixel: of the steps in it the one that holds most.
    const shown = $("stack").value === "after" ? after : before;
    const other = shown === after ? before : after;
    const pick = (m, s) => m === after ? s : twin[s];
    const cols = Math.max(1, Math.floor(width));
    const highest = (m, from, to) => {
      let best = pick(m, from);
      for (let s = from + 1; s < to; s++) if (m.total[pick(m, s)] > m.total[best]) best = pick(m, s);
      return best;
    };
    const colours = d.kinds.map((_, k) => css("--k" + k));
    const line = [];
    for (let i = 0; i < cols; i++) {
      const from = stepAt(i / cols), to = Math.max(from + 1, stepAt((i + 1) / cols));
      const at = highest(shown, from, to);
      let sum = 0;
      for (let k = 0; k < colours.length; k++) {
        const b = shown.kinds[k][at];
        if (b > 0) {
          c.fillStyle = colours[k];
          const top = y(sum + b);
          c.fillRect(pad.left + i, top, 1, y(sum) - top);
          sum += b;
        }
      }
      line.push(y(other.total[highest(other, from, to)]));
    }
    c.strokeStyle = css("--before"); c.lineWidth = 1.6;
    c.beginPath();
    line.forEach((at, i) => i ? c.lineTo(pad.left + i + 0.5, at) : c.moveTo(pad.left + 0.5, at));
    c.stroke();
    c.textAlign = "left"; c.fillStyle = css("--ink");
    const names = shown === after ? ["planned", "unplanned"] : ["unplanned", "planned"];
    c.fillText("areas: " + names[0] + ", peak " + d.most + bytes(shown.total[shown.peak]), pad.left, 10);
    c.fillText("line: " + names[1] + ", peak " + d.most + bytes(other.total[other.peak]), pad.left + (w > 560 ? 250 : 0), w > 560 ? 10 : 26);
    if (d.budget) {
      c.strokeStyle = css("--budget"); c.setLineDash([6, 4]); c.lineWidth = 1.4;
      c.beginPath(); c.moveTo(pad.left, y(d.budget)); c.lineTo(w - pad.right, y(d.budget)); c.stroke();
      c.setLineDash([]); c.fillStyle = css("--budget"); c.textAlign = "right";
      c.strokeStyle = css("--page"); c.lineWidth = 4; c.lineJoin = "round";
      c.strokeText("budget " + bytes(d.budget), w - pad.right, y(d.budget) - 9);
      c.fillText("budget " + bytes(d.budget), w - pad.right, y(d.budget) - 9);
    }
    c.fillStyle = css("--soft"); c.textAlign = "left"; c.fillText(byTime() ? "0 µs" : "first node", pad.left, h - 10);
    c.textAlign = "right"; c.fillText(byTime() ? micros(time[after.n]) : "last node", w - pad.right, h - 10);
    const x = pad.left + width * (positionOf(cursor) + positionOf(cursor + 1)) / 2;
    c.strokeStyle = css("--accent"); c.lineWidth = 2;
    c.beginPath(); c.moveTo(x, pad.top); c.lineTo(x, h - pad.bottom); c.stroke();
    c.beginPath(); c.arc(x, y(after.total[cursor]), 4, 0, 7); c.fillStyle = css("--accent"); c.fill();
  };
  const layerName = (l) => l < 0 ? "outside layers" : "layer " + l + (d.layers[l] ? " (" + d.layers[l].name + ")" : "");
  const doing = (o, again) => d.ops.p[o] === 2 ? (again ? "moved back in" : "moved out") : again ? "computed again" : d.ops.p[o] ? "backward" : "forward";
  const fill = (id, rows) => $(id).tBodies[0].replaceChildren(...rows);
  const cell = (text, cls) => { const e = el("td", text, cls); e.title = text; return e; };
  const show = () => {
    slider.value = cursor;
    if (!after.n) { $("where").textContent = "Nothing runs."; return; }
    const o = after.s[cursor], old = twin[cursor];
    slider.setAttribute("aria-valuetext", d.ops.n[o] + ", " + bytes(after.total[cursor]));
    $("where").textContent = "Node " + (cursor + 1) + " of " + after.n + ": " + d.ops.n[o] + " (" + d.opkinds[d.ops.k[o]] + ", " +
      doing(o, after.again[cursor]) + ", " + layerName(d.ops.l[o]) + "): " +
      bytes(after.total[cursor]) + " held; unplanned " + bytes(before.total[old]);
    fill("kinds", used.map((k) => {
      const name = d.kinds[k], label = el("td"); label.append(key(k), name);
      return row(label, cell(bytes(after.kinds[k][cursor]), "n"), cell(bytes(before.kinds[k][old]), "n"));
    }));
    const held = heldAt(after, cursor), layers = new Map();
    for (const t of held) layers.set(t.layer, (layers.get(t.layer) || 0) + t.bytes);
    fill("by-layer", [...layers].sort((a, b) => b[1] - a[1]).slice(0, 8).map(([l, b]) => row(cell(layerName(l)), cell(bytes(b), "n"))));
    fill("largest", held.slice(0, 8).map((t) => {
      const label = cell(t.name); label.prepend(key(t.kind));
      return row(label, cell(bytes(t.bytes), "n"));
    }));
  };
  let queued = false;
  const update = () => { if (!queued) { queued = true; requestAnimationFrame(() => { queued = false; draw(); show(); }); } };
  const point = (event) => {
    const box = canvas.getBoundingClientRect();
    const x = (event.clientX - box.left - pad.left) / (box.width - pad.left - pad.right);
    if (after.n && x >= 0 && x <= 1) { cursor = stepAt(x); update(); }
  };
  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerdown", point);
  slider.addEventListener("input", () => { cursor = +slider.value; update(); });
  $("axis").addEventListener("change", update);
  $("stack").addEventListener("change", update);
  $("to-peak").addEventListener("click", () => { cursor = after.peak; update(); });
  $("to-peak-before").addEventListener("click", () => { cursor = Math.max(0, twin.indexOf(before.peak)); update(); });
  new ResizeObserver(update).observe(canvas);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => { update(); frontier(); });

  // What is alive at both peaks.
  for (const [id, m] of [["after", after], ["before", before]]) {
    const held = heldAt(m, m.peak), most = held.length ? held[0].bytes : 1;
    if (m.n) $("top-" + id + "-title").textContent += ": " + d.most + bytes(m.total[m.peak]) + ", while " + d.ops.n[m.s[m.peak]] + " runs";
    fill("top-" + id, held.slice(0, 14).map((t) => {
      const meter = el("span", undefined, "meter");
      meter.style.width = (100 * t.bytes / Math.max(1, most)) + "%";
      const name = cell(t.name); name.append(meter);
      const kind = el("td"); kind.append(key(t.kind), d.kinds[t.kind]);
      return row(name, kind, cell(bytes(t.bytes), "n"));
    }));
  }

  // The price of memory.
  const svgEl = (tag, attributes, text) => {
    const e = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
    if (text) { const t = document.createElementNS("http://www.w3.org/2000/svg", tag === "text" ? "tspan" : "title"); t.textContent = text; e.append(t); }
    return e;
  };
  const frontier = () => {
    const f = d.frontier;
    if (!f) { $("s-frontier").hidden = true; return; }
    const points = f.points.filter((p) => p.peak_bytes !== null);
    const W = Math.max(280, $("frontier").clientWidth), H = W < 600 ? 300 : 400, L = 64, R = 20, T = 30, B = 48, PARTS = W < 600 ? 2 : 4;
    const xs = [...points.flatMap((p) => [p.peak_bytes, p.budget_bytes]), ...f.policies.map((p) => p.peak_bytes), f.chosen.peak_bytes, f.unplanned_bytes];
    const low = Math.min(...xs), high = Math.max(...xs, low + 1);
    const most = Math.max(1, ...points.map((p) => p.overhead_pct), ...f.policies.map((p) => p.overhead_pct), f.chosen.overhead_pct) * 1.06;
    const x = (b) => L + (W - L - R) * (b - low) / (high - low), y = (p) => H - B - (H - T - B) * p / most;
    const label = "Overhead over memory: from " + most.toFixed(1) + " % at " + bytes(low) + " to none at " + bytes(high) + "; chosen " + f.chosen.overhead_pct.toFixed(2) + " % at " + bytes(f.chosen.peak_bytes);
    const svg = svgEl("svg", { viewBox: `0 0 ${W} ${H}`, width: W, height: H, role: "img", "aria-label": label });
    for (let i = 0; i <= PARTS; i++) {
      const p = most * i / PARTS, b = low + (high - low) * i / PARTS;
      svg.append(svgEl("line", { x1: L, x2: W - R, y1: y(p), y2: y(p), stroke: css("--line") }));
      svg.append(svgEl("text", { x: L - 8, y: y(p) + 4, "text-anchor": "end" }, p.toFixed(1) + " %"));
      svg.append(svgEl("text", { x: x(b), y: H - B + 20, "text-anchor": i === 0 ? "start" : i === PARTS ? "end" : "middle" }, bytes(b)));
    }
    svg.append(svgEl("text", { x: (L + W) / 2, y: H - 8, "text-anchor": "middle" }, f.bytes_on + " of the step"));
    svg.append(svgEl("text", { x: 4, y: 14 }, "more " + (f.objective === "flops" ? "FLOPs" : "time")));
    const path = (list) => list.map((p) => p.join(",")).join(" ");
    svg.append(svgEl("polyline", { points: path(points.map((p) => [x(p.budget_bytes), y(Math.max(0, p.lower_bound_pct))])), fill: "none", stroke: css("--soft"), "stroke-dasharray": "6 4" }));
    svg.append(svgEl("polyline", { points: path(points.map((p) => [x(p.peak_bytes), y(p.overhead_pct)])), fill: "none", stroke: css("--accent"), "stroke-width": 2 }));
    for (const p of points)
      svg.append(svgEl("circle", { cx: x(p.peak_bytes), cy: y(p.overhead_pct), r: 4, fill: css("--accent") }, bytes(p.peak_bytes) + ": " + p.overhead_pct.toFixed(2) + " % more, at least " + p.lower_bound_pct.toFixed(2) + " %"));
    // Names stand beside, above or below their square, where neither a square nor another name is.
    const taken = [...f.policies, ...points, f.chosen].map((p) => [x(p.peak_bytes) - 6, y(p.overhead_pct) - 6, 12, 12]);
    const isFree = ([a, b, w, h]) => a > L && a + w <= W && b > 0 && b + h < H - B && !taken.some(([p, q, r, s]) => a < p + r && p < a + w && b < q + s && q < b + h);
    for (const p of f.policies) {
      const px = x(p.peak_bytes), py = y(p.overhead_pct), wide = 7.5 * p.policy.length + 4;
      const beside = [[px + 8, py - 7], [px - wide / 2, py - 22], [px - wide / 2, py + 8], [px - 8 - wide, py - 7], [px - wide, py - 22], [px - wide, py + 8], [px - wide, py - 37]];
      const place = beside.map(([a, b]) => [a, b, wide, 14]).find(isFree);
      if (place) taken.push(place);
      svg.append(svgEl("rect", { x: px - 4, y: py - 4, width: 8, height: 8, fill: css("--k4") }, p.policy + ": " + bytes(p.peak_bytes) + ", " + p.overhead_pct.toFixed(2) + " %"));
      if (place) svg.append(svgEl("text", { x: place[0] + 1, y: place[1] + 11 }, p.policy));
    }
    svg.append(svgEl("circle", { cx: x(f.chosen.peak_bytes), cy: y(f.chosen.overhead_pct), r: 9, fill: "none", stroke: css("--budget"), "stroke-width": 3 }, "this plan: " + bytes(f.chosen.peak_bytes) + ", " + f.chosen.overhead_pct.toFixed(2) + " %"));
    $("frontier").replaceChildren(svg, el("p", "Ringed: this plan, " + bytes(f.chosen.peak_bytes) + " at " + f.chosen.overhead_pct.toFixed(2) + " %. The smallest budget known to be feasible is " + bytes(f.smallest_feasible_bytes) + ".", "hint"));
  };
  frontier();
  let wide = 0;
  new ResizeObserver(() => { const now = $("frontier").clientWidth; if (now !== wide) { wide = now; frontier(); } }).observe($("frontier"));

  // Layers.
  if (!d.layers.length) $("s-layers").hidden = true;
  $("layers").classList.toggle("few", d.layers.length <= 40);
  const widest = Math.max(1, ...d.layers.map((l) => l.kept_bytes + l.recomputed_bytes + l.offloaded_bytes));
  d.layers.forEach((l) => {
    const b = el("button");
    b.type = "button";
    b.setAttribute("aria-pressed", "false");
    b.title = l.name + ": kept " + bytes(l.kept_bytes) + ", computed again " + bytes(l.recomputed_bytes) + ", " + l.recomputed_ops + " of " + l.ops + " nodes, " + micros(l.recompute_us) + " more" + (l.offloaded_bytes ? ", outside " + bytes(l.offloaded_bytes) + ", " + micros(l.transfer_us) + " of moving" : "");
    const stack = el("span", undefined, "stack");
    for (const [cls, n] of [["kept", l.kept_bytes], ["again", l.recomputed_bytes], ["outside", l.offloaded_bytes]]) {
      const part = el("span", undefined, cls);
      part.style.width = (100 * n / widest) + "%";
      stack.append(part);
    }
    b.append(el("strong", String(l.index)), el("span", l.kind, "what"), stack);
    b.setAttribute("aria-label", "Layer " + l.index + ", " + b.title);
    b.addEventListener("click", () => {
      $("layer").value = $("layer").value === String(l.index) ? "" : String(l.index);
      refresh();
    });
    $("layers").append(b);
    const option = el("option", "layer " + l.index); option.value = l.index;
    $("layer").append(option);
  });
  d.fates.forEach((f, i) => { const o = el("option", f); o.value = i; $("fate").append(o); });

  // The table of decisions: only rows in view exist.
  const v = d.values, ROW = 28, PRINTED = 300;
  const columns = [
    ["Value", (i) => d.names[v.v[i]], "t"],
    ["Decision", (i) => d.fates[v.f[i]], "t"],
    ["Memory", (i) => v.b[i], "n", (i) => bytes(v.b[i])],
    ["Time", (i) => d.ops.us[v.o[i]] * v.r[i], "n", (i) => (v.r[i] > 1 ? v.r[i] + " × " : "") + micros(d.ops.us[v.o[i]])],
    ["Layer", (i) => d.ops.l[v.o[i]], "n", (i) => d.ops.l[v.o[i]] < 0 ? "–" : String(d.ops.l[v.o[i]])],
    ["Node", (i) => d.ops.n[v.o[i]] + " (" + d.opkinds[d.ops.k[v.o[i]]] + ")", "t"],
    ["Because", (i) => d.texts[v.w[i]], "t"],
    ["Otherwise", (i) => d.texts[v.a[i]], "t"],
  ];
  const hay = v.v.map((_, i) => (d.names[v.v[i]] + "\n" + d.ops.n[v.o[i]] + "\n" + d.opkinds[d.ops.k[v.o[i]]] + "\n" + (d.modules[d.ops.m[v.o[i]]] || "")).toLowerCase());
  let rows = [], sort = 2, descending = true;
  const headers = columns.map(([name, , type], i) => {
    const th = el("th", undefined, type === "n" ? "n" : ""), b = el("button", name);
    th.scope = "col"; b.type = "button";
    b.addEventListener("click", () => { descending = sort === i ? !descending : type === "n"; sort = i; refresh(); });
    th.append(b); $("values").tHead.rows[0].append(th);
    return th;
  });
  const space = (height) => { const r = el("tr", undefined, "space"), c = el("td"); c.colSpan = columns.length; r.style.height = height + "px"; r.setAttribute("aria-hidden", "true"); r.append(c); return r; };
  let chosen = -1;
  const choose = (i) => {
    chosen = i;
    const o = v.o[i], module = d.modules[d.ops.m[o]];
    const facts = [["Decision", d.fates[v.f[i]] + ", " + bytes(v.b[i])], ["Because", d.texts[v.w[i]]], ["Otherwise", d.texts[v.a[i]]],
      ["Node", d.ops.n[o] + " (" + d.opkinds[d.ops.k[o]] + "), " + (v.r[i] > 1 ? v.r[i] + " × " : "") + micros(d.ops.us[o])],
      ["Where", layerName(d.ops.l[o]) + (module ? ", module " + module : "")]];
    const list = el("dl", undefined, "how");
    for (const [name, text] of facts) if (text) list.append(el("dt", name), el("dd", text));
    $("chosen").replaceChildren(el("h3", d.names[v.v[i]]), list);
    for (const r of $("values").tBodies[0].rows) r.classList.toggle("chosen", r.dataset.i === String(i));
  };
  const line = (i) => {
    const cells = columns.map(([, value, type, shown]) => cell(shown ? shown(i) : value(i), type === "n" ? "n" : ""));
    const b = el("button", cells[0].textContent);
    b.type = "button";
    cells[0].replaceChildren(b);
    const r = row(...cells);
    r.dataset.i = i;
    r.classList.toggle("chosen", i === chosen);
    r.addEventListener("click", () => choose(i));
    return r;
  };
  const render = (all) => {
    const box = $("scroll");
    const first = all ? 0 : Math.max(0, Math.floor(box.scrollTop / ROW) - 5);
    const last = all ? Math.min(rows.length, PRINTED) : Math.min(rows.length, first + Math.ceil(box.clientHeight / ROW) + 10);
    const list = rows.slice(first, last).map(line);
    if (all && rows.length > last) $("count").textContent += ": the first " + last + " are printed";
    $("values").tBodies[0].replaceChildren(...(all ? list : [space(first * ROW), ...list, space((rows.length - last) * ROW)]));
  };
  const refresh = () => {
    const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean), fate = $("fate").value, layer = $("layer").value;
    rows = [];
    for (let i = 0; i < v.v.length; i++)
      if ((fate === "" || v.f[i] === +fate) && (layer === "" || d.ops.l[v.o[i]] === +layer) && words.every((w) => hay[i].includes(w))) rows.push(i);
    const value = columns[sort][1], sign = descending ? -1 : 1;
    rows.sort((a, b) => { const p = value(a), q = value(b); return sign * (p < q ? -1 : p > q ? 1 : 0) || a - b; });
    headers.forEach((th, i) => th.setAttribute("aria-sort", i === sort ? (descending ? "descending" : "ascending") : "none"));
    tell();
    $("values").setAttribute("aria-rowcount", rows.length + 1);
    [...$("layers").children].forEach((b, i) => b.setAttribute("aria-pressed", String(layer === String(i))));
    $("scroll").scrollTop = 0;
    render();
  };
  for (const id of ["search", "fate", "layer"]) $(id).addEventListener("input", refresh);
  $("scroll").addEventListener("scroll", () => requestAnimationFrame(() => render()));
  const tell = () => { $("count").textContent = rows.length + " of " + v.v.length + " values, " + bytes(rows.reduce((n, i) => n + v.b[i], 0)); };
  addEventListener("beforeprint", () => { draw(); render(true); });
  addEventListener("afterprint", () => { tell(); render(); });
  refresh();
  update();
})();
