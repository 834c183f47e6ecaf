"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const element = id => document.getElementById(id);
const tokens = data.tokens, length = tokens.length, layers = data.weights.length, heads = data.heads;
const MAX_LINES = 3000, THUMBNAIL = 72;
const view = { layer: 0, head: 0, kind: null, from: null, to: null, pinned: false };

// For each layer, the matrices of its heads, row by row; 65,535 stands for a weight of 1.
const weights = data.weights.map(text => new Uint16Array(Uint8Array.from(atob(text), byte => byte.charCodeAt(0)).buffer));
const weight = (from, to) => weights[view.layer][(view.head * length + from) * length + to] / 65535;
const percent = share => Number((100 * share).toPrecision(share < 0.1 ? 2 : 3)) + "\u00a0%";
const nats = value => Number(value.toPrecision(3)) + " nats";

const color = name => {
  const [, hex] = getComputedStyle(document.documentElement).getPropertyValue(name).match(/#([0-9a-f]{6})/i);
  return [0, 2, 4].map(at => parseInt(hex.slice(at, at + 2), 16));
};
const make = (tag, values = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(values)) node.setAttribute(key, value);
  node.append(...children);
  return node;
};
const makeSvg = (tag, values = {}, text = "") => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(values)) node.setAttribute(key, value);
  node.textContent = text;
  return node;
};

// ---- all heads

// Draws the largest weight in each cell of a coarser grid, so that no line of the matrix is lost.
const thumbnail = (canvas, layer, head) => {
  const side = canvas.width, largest = new Float32Array(side * side), offset = head * length * length;
  for (let i = 0; i < length; i++)
    for (let j = 0; j < length; j++) {
      const cell = Math.floor(i * side / length) * side + Math.floor(j * side / length);
      largest[cell] = Math.max(largest[cell], weights[layer][offset + i * length + j]);
    }
  const context = canvas.getContext("2d"), image = context.createImageData(side, side), ink = color("--train");
  largest.forEach((value, n) => image.data.set([...ink, 255 * Math.sqrt(value / 65535)], 4 * n));
  context.putImageData(image, 0, 0);
};

const buttons = [];
const makeHeads = () => {
  const grid = element("heads"), side = Math.min(length, THUMBNAIL);
  grid.style.setProperty("--heads", heads);
  grid.append(make("span"), ...Array.from({ length: heads }, (_, head) => make("span", {}, head + 1)));
  for (let layer = 0; layer < layers; layer++) {
    grid.append(make("span", {}, layer + 1));
    for (let head = 0; head < heads; head++) {
      const name = `${layer + 1}-${head + 1}`;
      const button = make("button", { "data-head": name, "aria-label": `head ${name}`, title: `head ${name}` });
      button.append(make("canvas", { width: side, height: side }));
      buttons.push(button);
      grid.append(button);
    }
  }
};
const paintHeads = () => buttons.forEach((button, n) =>
  thumbnail(button.firstChild, Math.floor(n / heads), n % heads));

const showKind = kind => {
  view.kind = kind;
  for (const choice of element("choices").children)
    choice.setAttribute("aria-pressed", choice.dataset.kind === (kind?.name ?? ""));
  const largest = kind && Math.max(...kind.shares.flat(), 1e-9);
  buttons.forEach((button, n) => {
    button.querySelectorAll("i, b").forEach(old => old.remove());
    button.firstChild.style.visibility = kind ? "hidden" : "";
    if (!kind) return;
    const value = kind.shares[Math.floor(n / heads)][n % heads];
    const shade = make("i"), figure = make("b", {}, kind.entropy ? value.toFixed(1) : Math.round(100 * value));
    shade.style.opacity = 0.75 * value / largest;
    button.append(shade, figure);
  });
};
const makeChoices = () => {
  const kinds = [...data.kinds, { name: "entropy", label: "entropy, nats", shares: data.entropy, entropy: true }];
  for (const kind of [null, ...kinds]) {
    const label = kind ? (kind.entropy ? kind.label : `% to ${kind.label}`) : "matrices";
    const choice = make("button", { "data-kind": kind?.name ?? "" }, label);
    choice.addEventListener("click", () => showKind(kind));
    element("choices").append(choice);
  }
};

// ---- one head: its matrix

const matrix = document.querySelector("div.matrix"), canvas = matrix.appendChild(make("canvas"));
const frame = { cell: 1, left: 0, top: 0 };
const shortened = (context, text, room) => {
  while (text.length > 1 && context.measureText(text).width > room) text = text.slice(0, -2) + "…";
  return text;
};
const tokenLabel = token => (token.joined ? "·" : "") + token.text;

const paintMatrix = () => {
  const context = canvas.getContext("2d"), room = matrix.clientWidth - 4, ratio = window.devicePixelRatio || 1;
  const font = size => `${size}px ${getComputedStyle(document.body).fontFamily}`;
  context.font = font(12);
  const widest = Math.ceil(Math.max(...tokens.map(token => context.measureText(tokenLabel(token)).width)));
  const gutter = Math.min(widest + 8, 96, room * 0.25);
  frame.cell = Math.max(length > 80 ? 4 : 11, Math.min(26, Math.floor((room - gutter) / length)));
  const labeled = frame.cell >= 8;
  frame.left = frame.top = labeled ? gutter : 2;
  const width = frame.left + length * frame.cell + 2, height = frame.top + length * frame.cell + 2;
  Object.assign(canvas, { width: width * ratio, height: height * ratio });
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  context.scale(ratio, ratio);
  context.fillStyle = `rgb(${color("--train")})`;
  for (let i = 0; i < length; i++)
    for (let j = 0; j < length; j++) {
      context.globalAlpha = Math.sqrt(weight(i, j));
      context.fillRect(frame.left + j * frame.cell, frame.top + i * frame.cell, frame.cell - (frame.cell > 6), frame.cell - (frame.cell > 6));
    }
  context.globalAlpha = 1;
  context.strokeStyle = `rgb(${color("--held-out")})`;
  const side = length * frame.cell;
  if (view.from !== null) context.strokeRect(frame.left - 0.5, frame.top + view.from * frame.cell - 0.5, side, frame.cell);
  if (view.to !== null) context.strokeRect(frame.left + view.to * frame.cell - 0.5, frame.top - 0.5, frame.cell, side);
  if (!labeled) return;
  context.font = font(Math.min(12, frame.cell));
  context.textBaseline = "middle";
  tokens.forEach((token, n) => {
    context.fillStyle = `rgb(${color(token.special ? "--soft" : "--ink")})`;
    const text = shortened(context, tokenLabel(token), gutter - 8), center = (n + 0.5) * frame.cell;
    context.textAlign = "right";
    context.fillText(text, frame.left - 5, frame.top + center);
    context.save();
    context.translate(frame.left + center, frame.top - 5);
    context.rotate(-Math.PI / 2);
    context.textAlign = "left";
    context.fillText(text, 0, 0);
    context.restore();
  });
};
const atPointer = event => {
  const box = canvas.getBoundingClientRect();
  const cellAt = (offset, margin) => Math.floor((offset - margin) / frame.cell);
  const [to, from] = [cellAt(event.clientX - box.left, frame.left), cellAt(event.clientY - box.top, frame.top)];
  return from >= 0 && from < length && to >= 0 && to < length ? [from, to] : null;
};
const showWeight = () => {
  const { from, to } = view, name = n => `“${tokens[n].text}”`;
  element("matrix-read").textContent = from !== null && to !== null
    ? `${name(from)} attends to ${name(to)}: ${percent(weight(from, to))}` : "Point at a cell to read its weight.";
};
for (const kind of ["pointermove", "pointerdown"])
  canvas.addEventListener(kind, event => {
    const at = atPointer(event);
    if (at) [view.from, view.to, view.pinned] = [...at, false];
    else [view.from, view.to] = [null, null];
    paintChoice();
  });
canvas.addEventListener("pointerleave", event => { if (event.pointerType === "mouse") clear(); });

// ---- one head: its lines

const box = document.querySelector(".lines");
const svg = box.appendChild(makeSvg("svg", { class: "tokens", tabindex: 0, role: "img" }));
const pitch = length > 120 ? 16 : 21, allLines = svg.appendChild(makeSvg("g")), chosenLines = svg.appendChild(makeSvg("g"));
const labels = svg.appendChild(makeSvg("g"));
let sides = { left: 0, right: 0, width: 0 };

const line = (group, from, to, value, other = false) => group.append(makeSvg("line", {
  x1: sides.left + 6, x2: sides.right - 6, y1: (from + 0.5) * pitch, y2: (to + 0.5) * pitch,
  "stroke-opacity": Math.min(1, 0.08 + 0.92 * value).toFixed(3), "stroke-width": (0.5 + 3 * value).toFixed(2),
  ...(other ? { class: "other" } : {}),
}));
const layOut = () => {
  const width = Math.max(260, box.clientWidth), left = Math.round(Math.min(0.36 * width, 170));
  const maxCharacters = Math.floor((left - 44) / 7.2);
  sides = { left, right: width - left, width };
  svg.setAttribute("viewBox", `0 0 ${width} ${length * pitch + 4}`);
  svg.setAttribute("aria-label", "tokens joined by lines; the arrow keys choose a token");
  labels.replaceChildren();
  for (const side of ["from", "to"])
    tokens.forEach((token, n) => {
      const left = side === "from", x = left ? sides.left : sides.right, y = n * pitch;
      const text = tokenLabel(token).length > maxCharacters ? tokenLabel(token).slice(0, maxCharacters - 1) + "…" : tokenLabel(token);
      const shade = makeSvg("rect", { x: left ? 0 : x, y: y + 1, width: sides.left, height: pitch - 2, rx: 3, opacity: 0, class: `shade ${side}` });
      const word = makeSvg("text", { x, y: y + pitch * 0.7, "text-anchor": left ? "end" : "start", ...(token.special ? { class: "special" } : {}) }, text);
      const figure = makeSvg("text", { x: left ? 0 : width, y: y + pitch * 0.7, "text-anchor": left ? "start" : "end", class: `weight ${side}` });
      const target = makeSvg("rect", { x: left ? 0 : x, y, width: sides.left, height: pitch, class: "target" });
      target.addEventListener("pointerenter", event => { if (event.pointerType === "mouse" && !view.pinned) choose(side, n); });
      target.addEventListener("click", () => {
        const isChosen = view.pinned && view[side] === n && view[left ? "to" : "from"] === null;
        view.pinned = !isChosen;
        isChosen ? clear() : choose(side, n);
      });
      labels.append(shade, word, figure, target);
    });
};
const paintLines = () => {
  const visible = [];
  for (let i = 0; i < length; i++)
    for (let j = 0; j < length; j++) if (weight(i, j) > 0.02) visible.push([i, j, weight(i, j)]);
  visible.sort((a, b) => b[2] - a[2]);
  allLines.replaceChildren();
  for (const entry of visible.slice(0, MAX_LINES)) line(allLines, ...entry);
};
const choose = (side, n) => {
  [view.from, view.to] = side === "from" ? [n, null] : [null, n];
  paintChoice();
};
const clear = () => {
  if (view.pinned) return;
  [view.from, view.to] = [null, null];
  paintChoice();
};
svg.addEventListener("pointerleave", event => { if (event.pointerType === "mouse") clear(); });
svg.addEventListener("keydown", event => {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (event.key === "Escape") { view.pinned = false; clear(); }
  if (!step) return;
  event.preventDefault();
  view.pinned = true;
  choose("from", ((view.from ?? (step > 0 ? -1 : length)) + step + length) % length);
});

// Marks the chosen token in both pictures; shows its weights next to the tokens, and only its lines.
const paintChoice = () => {
  const { from, to } = view, hasChoice = from !== null || to !== null;
  allLines.style.display = hasChoice ? "none" : "";
  chosenLines.replaceChildren();
  const weightOf = { from: () => 0, to: () => 0 };
  if (from !== null) weightOf.to = n => weight(from, n);
  else if (to !== null) weightOf.from = n => weight(n, to);
  if (from !== null) tokens.forEach((_, n) => { if (weight(from, n) > 0.002) line(chosenLines, from, n, weight(from, n), n === to); });
  else if (to !== null) tokens.forEach((_, n) => { if (weight(n, to) > 0.002) line(chosenLines, n, to, weight(n, to)); });
  for (const side of ["from", "to"]) {
    labels.querySelectorAll(`.shade.${side}`).forEach((shade, n) =>
      shade.setAttribute("opacity", view[side] === n ? 0.35 : (0.5 * weightOf[side](n)).toFixed(3)));
    labels.querySelectorAll(`.weight.${side}`).forEach((figure, n) => {
      figure.textContent = weightOf[side](n) >= 0.005 ? percent(weightOf[side](n)) : "";
    });
  }
  element("lines-read").textContent = from !== null ? `“${tokens[from].text}” attends to` :
    to !== null ? `“${tokens[to].text}” is attended to by` : "Point at a token, or tap it, to see its weights.";
  showWeight();
  paintMatrix();
};

// ---- the choice of a head

const paintShares = () => {
  const rows = data.kinds.flatMap(kind => {
    const value = kind.shares[view.layer][view.head], bar = make("i"), mark = make("u");
    bar.style.width = `${100 * value}%`;
    mark.style.left = `${100 * kind.even}%`;
    return [make("span", {}, kind.label), make("div", {}, bar, mark), make("span", { class: "figure" }, percent(value))];
  });
  element("shares").replaceChildren(...rows);
};
const select = (layer, head) => {
  [view.layer, view.head] = [layer, head];
  const name = `${layer + 1}-${head + 1}`;
  element("name").textContent = `Head ${name}`;
  element("entropy").textContent = `entropy ${nats(data.entropy[layer][head])}, ${nats(data.even_entropy)} if uniform`;
  for (const button of document.querySelectorAll("#heads [data-head]")) button.setAttribute("aria-pressed", button.dataset.head === name);
  for (const circle of document.querySelectorAll("circle[data-head]")) circle.classList.toggle("chosen", circle.dataset.head === name);
  paintLines();
  paintShares();
  paintChoice();
};
const step = offset => {
  const next = (view.layer * heads + view.head + offset + layers * heads) % (layers * heads);
  select(Math.floor(next / heads), next % heads);
};
element("before").addEventListener("click", () => step(-1));
element("after").addEventListener("click", () => step(1));

makeHeads();
makeChoices();
for (const target of document.querySelectorAll("[data-head]"))
  target.addEventListener("click", () => {
    const [layer, head] = target.dataset.head.split("-").map(Number);
    select(layer - 1, head - 1);
    element("large").scrollIntoView({ behavior: "smooth", block: "start" });
  });
const paintAll = () => { layOut(); paintHeads(); select(view.layer, view.head); };
// Show the head with the lowest entropy first.
const entropies = data.entropy.flat(), narrowest = entropies.indexOf(Math.min(...entropies));
[view.layer, view.head] = [Math.floor(narrowest / heads), narrowest % heads];
showKind(null);
paintAll();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paintAll);
let width = box.clientWidth;
addEventListener("resize", () => { if (box.clientWidth !== width) { width = box.clientWidth; paintAll(); } });
