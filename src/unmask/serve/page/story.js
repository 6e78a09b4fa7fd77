/* What a sampler did, step by step: the candidates, and the slider that goes back and forth in them. */

import { $, copied, make, visible } from "./common.js";

/* The tokens of each candidate at each step, replayed from what the steps changed. */
export const story = { given: [], steps: [], results: [], at: 0, playing: 0, following: true };

export function begin(canvas) {
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

export const last = () => Math.max(0, ...story.steps.map((steps) => steps.length));

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

export function show(step) {
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

export function walk(event) {
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

export function pause() {
  clearInterval(story.playing);
  story.playing = 0;
  $("play").textContent = "Play";
  $("play").setAttribute("aria-label", "Play the steps");
}

export function setUpStory() {
  $("scrub").addEventListener("input", () => {
    pause();
    story.following = Number($("scrub").value) >= last();
    show(Number($("scrub").value));
  });
  $("play").addEventListener("click", play);
}
