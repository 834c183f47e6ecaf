"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const element = id => document.getElementById(id);
const HEIGHT = 190, LEFT = 50, RIGHT = 8, TOP = 16, BOTTOM = 22, FEW = 40;
const FROM_ZERO = new Set(["tokens/s", "s", "bytes", "steps"]);
const view = { low: data.low, high: Math.max(data.high, data.low + 1), smooth: 2, log: false, at: null };

// ---- numbers as text

const short = value => {
  for (const [size, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(value) >= size) return Number((value / size).toPrecision(4)) + letter;
  return plain(value);
};
const plain = value => value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7)
  ? value.toExponential(2).replace(/\.?0+e/, "e") : String(Number(value.toPrecision(4)));
const write = (value, unit) => {
  if (value === null) return "–";
  if (unit === "share") return plain(Number((100 * value).toPrecision(3))) + "\u00a0%";
  if (unit === "bytes") return Number((value / 1e9).toPrecision(3)) + " GB";
  if (unit === "tokens/s" || unit === "steps") return short(value);
  return plain(value);
};
const ticks = (low, high, count) => {
  const raw = (high - low) / count, size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map(f => f * size).find(s => s >= raw * (1 - 1e-9));
  const values = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + 1e-9 * step; n++) values.push(n * step);
  return values;
};
const logTicks = (low, high) => {
  const values = [];
  for (let e = Math.floor(Math.log10(low)); 10 ** e <= high; e++)
    for (const f of [1, 2, 5]) if (f * 10 ** e >= low && f * 10 ** e <= high) values.push(f * 10 ** e);
  if (values.length < 2) return ticks(low, high, 4);
  return values.length <= 7 ? values : values.filter(t => Math.abs(Math.log10(t) % 1) < 1e-9);
};

// ---- curves

// Indices of the curve's points in view, with one more on either side.
const inView = curve => {
  let first = 0, end = curve.x.length;
  while (first < end && curve.x[first] < view.low) first++;
  while (end > first && curve.x[end - 1] > view.high) end--;
  return [Math.max(0, first - 1), Math.min(curve.x.length, end + 1)];
};
const isSmoothed = curve => view.smooth > 0 && curve.kind !== "held-out" && curve.x.length > FEW;
const smoothed = (curve, first, end) => {
  const reach = (view.high - view.low) * view.smooth / 200, out = [];
  let from = first, to = first, sum = 0, count = 0;
  for (let i = first; i < end; i++) {
    const room = Math.min(reach, curve.x[i] - curve.x[first], curve.x[end - 1] - curve.x[i]);
    for (; to < end && curve.x[to] <= curve.x[i] + room; to++) if (curve.y[to] !== null) { sum += curve.y[to]; count++; }
    for (; curve.x[from] < curve.x[i] - room; from++) if (curve.y[from] !== null) { sum -= curve.y[from]; count--; }
    // At the end the window shrinks again, so points ahead leave it.
    for (; to > i + 1 && curve.x[to - 1] > curve.x[i] + room; to--) if (curve.y[to - 1] !== null) { sum -= curve.y[to - 1]; count--; }
    out.push(curve.y[i] === null || !count ? null : sum / count);
  }
  return out;
};
const nearest = (curve, step) => {
  let low = 0, high = curve.x.length - 1;
  while (low < high) { const middle = (low + high) >> 1; if (curve.x[middle] < step) low = middle + 1; else high = middle; }
  return low > 0 && step - curve.x[low - 1] < curve.x[low] - step ? low - 1 : low;
};

// ---- drawing

// Eight colors; further curves use them with dashes.
data.charts.forEach(chart => chart.curves.forEach((curve, number) => {
  curve.style = `--color: var(--c${number % 8});` + (number < 8 ? "" : ` --dash: ${number < 16 ? "6 3" : "2 3"};`);
}));

const make = (kind, attributes, text) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
};
const figures = [...document.querySelectorAll(".chart[data-number]")].map((figure, place) => {
  const chart = data.charts[Number(figure.dataset.number)], keys = figure.querySelector(".keys"), values = [];
  for (const curve of chart.curves) {
    const key = document.createElement("span"), value = document.createElement("b");
    key.style.cssText = curve.style;
    key.title = curve.not_finite ? `${curve.name}: ${curve.not_finite} records with NaN or infinity` : curve.name;
    key.append(curve.name + " ", value);
    keys.append(key);
    values.push(value);
  }
  return { figure, chart, values, svg: figure.querySelector("svg"), clip: `clip${place}` };
});

const draw = one => {
  const { svg, chart } = one, width = svg.clientWidth || 360;
  let least = Infinity, most = -Infinity;
  const shown = chart.curves.map(curve => {
    const [first, end] = inView(curve);
    for (let i = first; i < end; i++) {
      if (curve.y[i] === null || curve.x[i] < view.low || curve.x[i] > view.high) continue;
      least = Math.min(least, curve.low.length ? curve.low[i] : curve.y[i]);
      most = Math.max(most, curve.high.length ? curve.high[i] : curve.y[i]);
    }
    return { curve, first, end };
  });
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  svg.replaceChildren();
  if (least > most) { least = 0; most = 1; }
  const log = view.log && least > 0;
  if (!log && least >= 0 && (FROM_ZERO.has(chart.unit) || least < 0.4 * most)) least = 0;
  if (most - least <= 1e-9 * Math.abs(most)) { most += Math.abs(most) / 10 || 1; least -= least ? Math.abs(least) / 10 : 0; }
  const scale = log ? Math.log : value => value;
  if (!log) most += (most - least) * 0.04;
  const x = step => LEFT + (step - view.low) / (view.high - view.low) * (width - LEFT - RIGHT);
  const y = value => HEIGHT - BOTTOM - (scale(value) - scale(least)) / (scale(most) - scale(least)) * (HEIGHT - TOP - BOTTOM);
  one.x = x; one.y = y;
  one.step = place => Math.min(view.high, Math.max(view.low, view.low + (place - LEFT) / (width - LEFT - RIGHT) * (view.high - view.low)));

  const clip = make("clipPath", { id: one.clip });
  clip.append(make("rect", { x: LEFT, y: TOP - 4, width: width - LEFT - RIGHT, height: HEIGHT - TOP - BOTTOM + 8 }));
  svg.append(clip);
  for (const value of log ? logTicks(least, most) : ticks(least, most, 4)) {
    svg.append(make("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      make("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, write(value, chart.unit)));
  }
  for (const step of ticks(view.low, view.high, width < 300 ? 3 : 5).filter(Number.isInteger))
    svg.append(make("text", { x: x(step), y: HEIGHT - 5, "text-anchor": x(step) > width - 24 ? "end" : "middle" }, short(step)));
  svg.append(...marks(x, width));
  const inside = make("g", { "clip-path": `url(#${one.clip})` });
  for (const { curve, first, end } of shown) inside.append(...paths(curve, first, end, x, y));
  one.cursor = make("g", {});
  svg.append(inside, one.cursor);
};

const marks = (x, width) => {
  const nodes = [];
  let free = -Infinity;
  for (const mark of [...data.marks].sort((a, b) => a.step - b.step)) {
    if (mark.step < view.low || mark.step > view.high) continue;
    const at = x(mark.step), style = `--color: var(${mark.color})`, room = mark.kind.length * 6;
    nodes.push(make("line", { class: "mark", style, x1: at, x2: at, y1: TOP - 4, y2: HEIGHT - BOTTOM }));
    const left = Math.min(at - 2, width - RIGHT - room);
    if (left > free) {
      nodes.push(make("text", { class: "mark", style, x: left, y: TOP - 7 }, mark.kind));
      free = left + room + 4;
    }
  }
  return nodes;
};

const paths = (curve, first, end, x, y) => {
  const style = curve.style, nodes = [];
  const line = values => {
    let text = "", down = false;
    for (let i = first; i < end; i++) {
      const value = values[i - first];
      if (value !== null) text += `${down ? "L" : "M"}${x(curve.x[i]).toFixed(1)} ${y(value).toFixed(1)}`;
      down = value !== null;
    }
    return text;
  };
  const own = curve.y.slice(first, end), soft = isSmoothed(curve);
  if (curve.low.length) {
    const whole = Array.from({ length: end - first }, (_, i) => first + i).filter(i => curve.low[i] !== null);
    const text = [...whole.map(i => [i, curve.high[i]]), ...whole.reverse().map(i => [i, curve.low[i]])]
      .map(([i, value]) => `${x(curve.x[i]).toFixed(1)} ${y(value).toFixed(1)}`).join("L");
    if (text) nodes.push(make("path", { class: "band", style, d: `M${text}Z` }));
  } else if (soft) nodes.push(make("path", { class: "raw", style, d: line(own) }));
  nodes.push(make("path", { style, d: line(soft ? smoothed(curve, first, end) : own) }));
  if (end - first <= FEW) for (let i = first; i < end; i++)
    if (curve.y[i] !== null) nodes.push(make("circle", { style, cx: x(curve.x[i]), cy: y(curve.y[i]), r: 2.4 }));
  return nodes;
};

// ---- values under the pointer: one step for all panels

const read = () => {
  for (const one of figures) {
    one.cursor.replaceChildren();
    one.chart.curves.forEach((curve, number) => {
      const i = view.at === null ? curve.x.length - 1 : nearest(curve, view.at), value = curve.y[i];
      one.values[number].textContent = write(value, one.chart.unit);
      const inside = curve.x[i] >= view.low && curve.x[i] <= view.high;
      if (view.at !== null && value !== null && inside)
        one.cursor.append(make("circle", { style: curve.style, cx: one.x(curve.x[i]), cy: one.y(value), r: 3.6 }));
    });
    if (view.at === null) continue;
    const at = one.x(view.at), label = "step " + Math.round(view.at).toLocaleString("en");
    one.cursor.prepend(make("line", { class: "at", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }));
    if (one.figure === view.figure)
      one.cursor.append(make("text", { class: "at", y: TOP + 8, x: at + (at > one.svg.clientWidth / 2 ? -5 : 5),
        "text-anchor": at > one.svg.clientWidth / 2 ? "end" : "start" }, label));
  }
};
const showMarks = (one, place) => {
  one.figure.querySelector(".mark-text")?.remove();
  if (place === null) return;
  const near = data.marks.filter(mark => mark.step >= view.low && mark.step <= view.high && Math.abs(one.x(mark.step) - place) < 6);
  if (!near.length) return;
  const note = document.createElement("div");
  note.className = "mark-text";
  for (const mark of near.slice(0, 3)) {
    const line = document.createElement("div"), kind = document.createElement("b");
    kind.style.color = `var(${mark.color})`;
    kind.textContent = mark.kind;
    line.append(kind, ` step ${mark.step.toLocaleString("en")}${mark.time ? ", " + mark.time : ""}: ${mark.message}`);
    note.append(line);
  }
  one.figure.append(note);
};

for (const one of figures) {
  let from = null;
  const place = event => event.clientX - one.svg.getBoundingClientRect().left;
  const showValues = event => {
    view.at = one.step(place(event)); view.figure = one.figure;
    read();
    showMarks(one, place(event));
    if (from !== null) {
      const [a, b] = [from, place(event)].sort((p, q) => p - q);
      one.cursor.append(make("rect", { class: "choice", x: a, width: b - a, y: TOP, height: HEIGHT - TOP - BOTTOM }));
    }
  };
  one.svg.addEventListener("pointermove", showValues);
  one.svg.addEventListener("pointerdown", event => {
    if (event.pointerType === "mouse") { from = place(event); one.svg.setPointerCapture(event.pointerId); }
    showValues(event);
  });
  one.svg.addEventListener("pointerup", event => {
    if (from === null) return;
    const steps = [one.step(from), one.step(place(event))].sort((a, b) => a - b), far = Math.abs(place(event) - from) > 5;
    from = null;
    if (far) choose(Math.floor(steps[0]), Math.ceil(steps[1]), ""); else showValues(event);
  });
  one.svg.addEventListener("pointerleave", () => { if (from === null) { view.at = null; showMarks(one, null); read(); } });
  one.svg.addEventListener("dblclick", () => choose(data.low, data.high, "1"));
}

// ---- controls, restored after a reload

const all = () => { figures.forEach(draw); read(); keep(); };
const choose = (low, high, share) => {
  view.low = low; view.high = Math.max(high, low + 1);
  element("range").value = share;
  element("whole").hidden = share === "1";
  all();
};
const keep = () => {
  const kept = { smooth: view.smooth, log: view.log, share: element("range").value, low: view.low, high: view.high };
  try { sessionStorage.setItem("dashboard " + document.title, JSON.stringify(kept)); } catch { /* no storage for files */ }
};
const chooseShare = share => choose(Math.round(data.high - (data.high - data.low) * Number(share)), data.high, share);
const showSmoothing = () => { element("smoothed").textContent = view.smooth ? `${view.smooth} %` : "off"; };
element("smooth").addEventListener("input", event => { view.smooth = Number(event.target.value); showSmoothing(); all(); });
element("log").addEventListener("change", event => { view.log = event.target.checked; all(); });
element("range").addEventListener("change", event => chooseShare(event.target.value));
element("whole").addEventListener("click", () => chooseShare("1"));

const ago = seconds => {
  for (const [size, name] of [[86400, "day"], [3600, "hour"], [60, "minute"]])
    if (seconds >= size) return `${Math.floor(seconds / size)} ${name}${seconds >= 2 * size ? "s" : ""} ago`;
  return "just now";
};
const showTimes = () => {
  for (const time of document.querySelectorAll("time[data-seconds]")) {
    const seconds = Number(time.dataset.seconds);
    time.textContent = `${ago(Date.now() / 1000 - seconds)} (${new Date(1000 * seconds).toISOString().slice(0, 16).replace("T", " ")} UTC)`;
  }
};
setInterval(showTimes, 30000);
showTimes();

let kept = null;
try { kept = JSON.parse(sessionStorage.getItem("dashboard " + document.title)); } catch { /* no storage for files */ }
if (kept) {
  Object.assign(view, { smooth: kept.smooth, log: kept.log });
  element("smooth").value = view.smooth;
  element("log").checked = view.log;
}
showSmoothing();
if (kept && kept.share === "") choose(kept.low, kept.high, ""); else chooseShare(kept ? kept.share : "1");
let drawn = window.innerWidth;
window.addEventListener("resize", () => { if (window.innerWidth !== drawn) { drawn = window.innerWidth; all(); } });
