"use strict";

const $ = (id) => document.getElementById(id);
const EXAMPLES = { default: "Select some of these words\nand turn them into holes." };
const HOLE = /<mask(?::(\d+))?>/g;

/* ---------- the server ---------- */

async function ask(path, body, signal) {
  const options = body === undefined ? {} : {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
  };
  const answer = await fetch(path, options);
  if (!answer.ok) throw new Error(await sentence(answer));
  return answer;
}

async function sentence(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the server answered ${answer.status}`;
  }
}

/* Server-sent events of a POST, which EventSource cannot do. */
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    for (let end = rest.indexOf("\n\n"); end >= 0; end = rest.indexOf("\n\n")) {
      const event = {};
      for (const line of rest.slice(0, end).split("\n")) {
        const colon = line.indexOf(": ");
        event[line.slice(0, colon)] = line.slice(colon + 2);
      }
      rest = rest.slice(end + 2);
      yield { name: event.event, data: JSON.parse(event.data) };
    }
  }
}

/* ---------- tabs ---------- */

function choose(tab) {
  for (const each of document.querySelectorAll("[role=tab]")) {
    const chosen = each === tab;
    each.setAttribute("aria-selected", chosen);
    each.tabIndex = chosen ? 0 : -1;
    $(each.getAttribute("aria-controls")).hidden = !chosen;
  }
}

function setUpTabs() {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  for (const [place, tab] of tabs.entries()) {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = tabs[(place + step + tabs.length) % tabs.length];
      choose(next);
      next.focus();
    });
  }
}

/* ---------- what to write ---------- */

const mode = () => document.querySelector("[name=mode]:checked").value;

function showMode() {
  const filling = mode() === "fill", nothing = mode() === "nothing";
  $("text-field").hidden = nothing;
  $("hole-tools").hidden = !filling;
  $("length-field").hidden = filling;
  $("text-label").textContent = filling ? "Your text, with holes" : "Your text, to be continued";
  $("go").textContent = filling ? "Fill the holes" : nothing ? "Write" : "Continue";
}

function segments(template) {
  const pieces = [];
  let end = 0;
  for (const hole of template.matchAll(HOLE)) {
    if (hole.index > end) pieces.push(template.slice(end, hole.index));
    pieces.push(Number(hole[1] || 1));
    end = hole.index + hole[0].length;
  }
  if (end < template.length) pieces.push(template.slice(end));
  return pieces;
}

async function hideSelection() {
  const field = $("text"), start = field.selectionStart, end = field.selectionEnd;
  const chosen = field.value.slice(start, end);
  if (!chosen) {
    problem("write", "Select the words to hide first.");
    return;
  }
  problem("write", "");
  // Holes inside the selection count with their own lengths.
  let tokens = 0;
  for (const piece of segments(chosen)) {
    if (typeof piece === "number") tokens += piece;
    else tokens += (await (await ask("/v1/tokens", { text: piece })).json()).tokens.length;
  }
  const hole = `<mask:${Math.max(1, tokens)}>`;
  field.setRangeText(hole, start, end, "end");
  field.focus();
}

function request() {
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  const wanted = { fill: () => segments($("text").value), continue: () => [$("text").value, number("length")].filter((piece) => piece !== ""), nothing: () => [number("length")] };
  return {
    segments: wanted[mode()](), n: number("n"), steps: number("steps"), sampler: $("sampler").value,
    temperature: number("temperature"), top_p: number("top-p"), seed: number("seed"),
  };
}

/* ---------- what was written ---------- */

/* The tokens of each candidate at each step, replayed from what the steps changed. */
const story = { given: [], steps: [], results: [], at: 0, playing: 0, following: true };

function begin(canvas) {
  story.given = canvas.tokens;
  story.steps = Array.from({ length: canvas.n }, () => []);
  story.results = Array.from({ length: canvas.n }, () => null);
  story.following = true;
  $("candidates").replaceChildren(...story.steps.map((_, index) => card(index, canvas.seed + index)));
  $("written").hidden = false;
  $("detail").hidden = true;
  show(0);
}

function card(index, seed) {
  const article = make("article", "card candidate");
  article.setAttribute("aria-label", `Candidate ${index + 1}`);
  const foot = make("div", "foot");
  const copy = make("button", "", "Copy the text");
  copy.type = "button";
  copy.addEventListener("click", () => copied(copy, textAt(index, Infinity)));
  foot.append(make("span", "", `seed ${seed}`), copy);
  const text = make("div", "text");
  text.setAttribute("role", "group");
  text.addEventListener("click", (event) => pick(event.target.closest(".token")));
  text.addEventListener("focusin", (event) => pick(event.target.closest(".token")));
  text.addEventListener("keydown", walk);
  article.append(text, foot);
  return article;
}

const last = () => Math.max(0, ...story.steps.map((steps) => steps.length));

function tokensAt(index, step) {
  const tokens = story.given.map((token) => (token ? { ...token, given: true } : null));
  const steps = story.steps[index];
  for (const [number, changes] of steps.slice(0, step).entries()) {
    for (const change of changes) {
      tokens[change.position] = change.id === null ? null : { ...change, step: number + 1 };
    }
  }
  const result = story.results[index];
  if (result && step >= steps.length) {
    // Only now is it known how halves of characters go together.
    const whole = result.spans.flatMap((span) => span.tokens);
    let next = 0;
    for (const [place, token] of story.given.entries()) {
      if (!token && whole[next]) tokens[place] = { ...tokens[place], ...whole[next] };
      if (!token) next += 1;
    }
  }
  return tokens;
}

const textAt = (index, step) => tokensAt(index, step).map((token) => (token ? token.text : "")).join("");

function show(step) {
  story.at = step;
  const end = last();
  $("scrub").max = end;
  $("scrub").value = step;
  $("scrub-label").textContent = `step ${step} of ${end}`;
  $("scrub").setAttribute("aria-valuetext", `step ${step} of ${end}`);
  for (const [index, article] of [...$("candidates").children].entries()) {
    const text = article.querySelector(".text");
    const mine = Math.min(step, story.steps[index].length);
    text.replaceChildren(...tokensAt(index, mine).map((token, place) => tokenElement(token, place, mine)));
    const first = text.querySelector(".token[data-written]");
    if (first) first.tabIndex = 0;
  }
}

function tokenElement(token, place, step) {
  if (!token) {
    const mask = make("span", "token mask");
    mask.setAttribute("role", "img");
    mask.setAttribute("aria-label", "hidden");
    return mask;
  }
  if (token.given) return make("span", "", token.text);
  const element = make("span", `token ${sureness(token.logprob)}`, token.text);
  if (token.step === step) element.classList.add("fresh");
  element.dataset.written = "";
  element.dataset.place = place;
  element.tabIndex = -1;
  element.setAttribute("role", "button");
  element.token = token;
  return element;
}

function sureness(logprob) {
  if (logprob === null || logprob === undefined) return "c3";
  const p = Math.exp(logprob);
  return `c${[0.05, 0.15, 0.35, 0.6, 0.85].filter((edge) => p >= edge).length}`;
}

function walk(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const here = event.target.closest(".token[data-written]");
  if (!step || !here) return;
  const all = [...event.currentTarget.querySelectorAll(".token[data-written]")];
  const next = all[all.indexOf(here) + step];
  if (next) {
    here.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
  event.preventDefault();
}

function pick(element) {
  if (!element || !element.token) return;
  for (const other of document.querySelectorAll(".picked")) other.classList.remove("picked");
  element.classList.add("picked");
  const token = element.token;
  const p = token.logprob === null ? null : Math.exp(token.logprob);
  const title = make("h3", "", p === null ? `written in step ${token.step}` : `probability ${percent(p)}, written in step ${token.step}`);
  title.prepend(make("code", "", visible(token.text)), " ");
  const bars = make("div", "bars");
  for (const other of token.alternatives || []) {
    const chosen = other.id === token.id ? "chosen" : "";
    const bar = make("div", "bar");
    bar.style.width = `${100 * other.probability}%`;
    bars.append(make("code", chosen, visible(other.text)), bar, make("span", chosen, percent(other.probability)));
  }
  $("detail").replaceChildren(title, bars);
  $("detail").hidden = false;
}

const percent = (p) => (p >= 0.0995 ? `${Math.round(100 * p)} %` : `${(100 * p).toPrecision(2)} %`);
const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "(part of a character)";

/* ---------- writing ---------- */

let writing = null;

async function write(event) {
  event.preventDefault();
  const body = request();
  if (!body.segments.some((piece) => typeof piece === "number")) {
    problem("write", "There is no hole yet: select some words and hide them.");
    return;
  }
  problem("write", "");
  pause();
  writing = new AbortController();
  busy("write", true);
  $("write-status").textContent = "waiting for a place…";
  try {
    const answer = await ask("/v1/infill", { ...body, alternatives: 6, stream: true }, writing.signal);
    for await (const { name, data } of events(answer)) {
      if (name === "canvas") {
        begin(data);
        $("curl").textContent = curl({ ...body, seed: data.seed });
      } else if (name === "step") {
        story.steps[data.index].push(data.changes);
        $("write-status").textContent = `step ${last()}`;
        if (story.following) show(last());
      } else if (name === "result") {
        story.results[data.index] = data;
        if (story.following) show(last());
      } else if (name === "error") {
        throw new Error(data.error.message);
      }
    }
    $("write-status").textContent = `done in ${last()} steps`;
  } catch (error) {
    $("write-status").textContent = "";
    if (error.name === "AbortError") $("write-status").textContent = "stopped";
    else problem("write", capital(error.message));
  } finally {
    busy("write", false);
    writing = null;
  }
}

function busy(form, on) {
  $(form === "write" ? "go" : "score-go").disabled = on;
  if (form === "write") $("stop").hidden = !on;
}

function curl(body) {
  const text = JSON.stringify(body).replaceAll("'", "'\\''");
  return `curl ${location.origin}/v1/infill -H 'Content-Type: application/json' -d '${text}'`;
}

function play() {
  if (story.playing) return pause();
  if (story.at >= last()) show(0);
  $("play").textContent = "Pause";
  $("play").setAttribute("aria-label", "Pause");
  story.playing = setInterval(() => {
    if (story.at >= last()) pause();
    else show(story.at + 1);
  }, Math.max(60, Math.min(400, 6000 / Math.max(1, last()))));
}

function pause() {
  clearInterval(story.playing);
  story.playing = 0;
  $("play").textContent = "Play";
  $("play").setAttribute("aria-label", "Play the steps");
}

/* ---------- scoring ---------- */

async function score(event) {
  event.preventDefault();
  problem("score", "");
  busy("score", true);
  $("score-status").textContent = "scoring…";
  try {
    const body = { text: $("score-text").value, draws: Number($("draws").value) };
    showScore(await (await ask("/v1/score", body)).json());
    $("score-status").textContent = "";
  } catch (error) {
    $("score-status").textContent = "";
    problem("score", capital(error.message));
  } finally {
    busy("score", false);
  }
}

function showScore(found) {
  const figures = [
    ["nats per token", found.nats_per_token, found.standard_error],
    ["perplexity", found.perplexity, found.perplexity_error],
    ["bits per byte", found.bits_per_byte, found.bits_per_byte_error],
  ];
  $("figures").replaceChildren(...figures.map(([name, value, error]) => {
    const box = make("div");
    const shown = make("dd", "", value.toPrecision(4));
    if (!found.exact) shown.append(" ", make("small", "", `± ${error.toPrecision(2)}`));
    box.append(make("dt", "", found.exact ? name : `${name}, at most`), shown);
    return box;
  }));
  $("surprise").replaceChildren(...found.tokens.map((token) => {
    const level = [0.5, 1.5, 3, 4.5, 6, 8].filter((edge) => token.nats >= edge).length;
    const element = make("span", `token s${level}`, token.text);
    element.tabIndex = -1;
    const tell = () => { $("surprise-detail").textContent = `${visible(token.text)} · ${token.nats.toFixed(2)} nats`; };
    element.addEventListener("click", tell);
    element.addEventListener("mouseenter", tell);
    element.addEventListener("focus", tell);
    element.dataset.written = "";
    return element;
  }));
  const first = $("surprise").querySelector(".token");
  if (first) first.tabIndex = 0;
  $("surprise-detail").textContent = "";
  plot(found.by_time);
  $("scored").hidden = false;
}

function plot(parts) {
  const width = 640, height = 220, left = 44, bottom = 30, top = 10;
  const most = Math.max(1e-9, ...parts.map((part) => part.nats_per_token + part.standard_error));
  const y = (value) => top + (height - top - bottom) * (1 - Math.max(0, value) / most);
  const x = (time) => left + (width - left - 8) * time;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Nats per token from each part of the time" });
  for (const tick of [0, most / 2, most]) {
    drawing.append(svg("line", { class: "axis", x1: left, x2: width - 8, y1: y(tick), y2: y(tick) }));
    drawing.append(svg("text", { class: "tick", x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, tick.toPrecision(2)));
  }
  for (const time of [0, 0.25, 0.5, 0.75, 1]) {
    drawing.append(svg("text", { class: "tick", x: x(time), y: height - 10, "text-anchor": time === 1 ? "end" : "middle" }, `t = ${time}`));
  }
  for (const part of parts) {
    const middle = (x(part.start) + x(part.end)) / 2;
    const value = part.nats_per_token, error = part.standard_error;
    drawing.append(svg("rect", { class: "column", x: x(part.start) + 1, width: x(part.end) - x(part.start) - 2, y: y(value), height: y(0) - y(value) }));
    drawing.append(svg("line", { class: "whisker", x1: middle, x2: middle, y1: y(value - error), y2: y(value + error) }));
  }
  $("by-time").replaceChildren(parts.length ? drawing : make("p", "soft", "This model has no time: its figure is exact."));
  const head = make("tr");
  head.append(...["from t", "to t", "nats per token", "standard error"].map((name) => make("th", "", name)));
  $("by-time-table").replaceChildren(head, ...parts.map((part) => {
    const row = make("tr");
    const cells = [part.start.toFixed(2), part.end.toFixed(2), part.nats_per_token.toFixed(4), part.standard_error.toFixed(4)];
    row.append(...cells.map((cell) => make("td", "", cell)));
    return row;
  }));
}

/* ---------- small things ---------- */

function make(name, kind = "", text = "") {
  const element = document.createElement(name);
  if (kind) element.className = kind;
  if (text) element.textContent = text;
  return element;
}

function svg(name, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text) element.textContent = text;
  return element;
}

function problem(form, text) {
  $(`${form}-error`).textContent = text;
  $(`${form}-error`).hidden = !text;
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

async function copied(button, text) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "The browser does not allow it";
  }
  setTimeout(() => { button.textContent = label; }, 1500);
}

async function findModel() {
  try {
    const { data: [model] } = await (await ask("/v1/models")).json();
    const size = new Intl.NumberFormat("en", { notation: "compact" }).format(model.parameters);
    $("model").textContent = `${model.id}: ${model.kind}, ${size} parameters, up to ${model.length} tokens`;
    $("sampler").replaceChildren(...model.samplers.map((name) => {
      const option = make("option", "", name);
      option.value = name;
      return option;
    }));
    const limits = { n: "n", steps: "steps", draws: "draws" };
    for (const [field, limit] of Object.entries(limits)) $(field).max = model.limits[limit];
    $("length").max = Math.min(model.length, model.limits.max_tokens);
    $("length").value = Math.min($("length").value, $("length").max);
  } catch (error) {
    $("model").textContent = capital(error.message);
    setTimeout(findModel, 2000);
  }
}

setUpTabs();
for (const radio of document.querySelectorAll("[name=mode]")) radio.addEventListener("change", showMode);
$("text").value = EXAMPLES.default;
$("text").addEventListener("keydown", (event) => {
  if (event.key.toLowerCase() === "m" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    hideSelection().catch((error) => problem("write", capital(error.message)));
  }
});
$("make-hole").addEventListener("click", () => hideSelection().catch((error) => problem("write", capital(error.message))));
$("write-form").addEventListener("submit", write);
$("stop").addEventListener("click", () => writing && writing.abort());
$("scrub").addEventListener("input", () => { pause(); story.following = Number($("scrub").value) >= last(); show(Number($("scrub").value)); });
$("play").addEventListener("click", play);
$("copy-curl").addEventListener("click", () => copied($("copy-curl"), $("curl").textContent));
$("score-form").addEventListener("submit", score);
$("surprise").addEventListener("keydown", walk);
showMode();
findModel();
