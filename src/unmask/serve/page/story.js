/* What a sampler did, step by step: the candidates, and the slider that goes back and forth in them. */

import { $, button, copied, make } from "./common.js";
import { describe, hideDetail } from "./detail.js";

const MOST_KEPT = 50;

/* The tokens of each candidate at each step are replayed from what the steps changed. `places` are those of
   the holes, `fixed` the tokens that somebody has put there, `body` is what was asked for. */
const nothing = { given: [], steps: [], results: [], at: 0, following: true, places: [], fixed: new Map(), body: null, seed: 0, status: "", command: "" };
export let story = nothing;
const past = [];
let playing = 0, picked = null, fix = () => {};

/* Who is told that a token shall stand at a place of a candidate. */
export const onFix = (told) => { fix = told; };

export function begin(canvas, body, fixed) {
  if (story.body) past.push(story);
  past.splice(0, past.length - MOST_KEPT);
  const places = canvas.tokens.flatMap((token, place) => (token && !fixed.has(place) ? [] : [place]));
  const rows = (value) => Array.from({ length: canvas.n }, value);
  story = { ...nothing, given: canvas.tokens, steps: rows(() => []), results: rows(() => null), places, fixed, body, seed: canvas.seed };
  open(0);
}

/* The result before this one. */
export function back() {
  if (!past.length) return;
  story = past.pop();
  $("write-status").textContent = story.status;
  $("curl").textContent = story.command;
  open(last());
}

function open(step) {
  pause();
  unpick();
  $("back").hidden = !past.length;
  $("candidates").replaceChildren(...story.steps.map((_, index) => card(index, story.seed + index)));
  $("written").hidden = false;
  show(step);
}

function card(index, seed) {
  const article = make("article", "card candidate");
  article.setAttribute("aria-label", `Candidate ${index + 1}`);
  const foot = make("div", "foot");
  const copy = button("Copy the text", () => copied(copy, textAt(index, Infinity)));
  foot.append(make("span", "", `seed ${seed}`), copy);
  const text = make("div", "text");
  text.setAttribute("role", "group");
  text.addEventListener("click", (event) => pick(index, event.target.closest(".token")));
  text.addEventListener("focusin", (event) => pick(index, event.target.closest(".token")));
  text.addEventListener("keydown", walk);
  article.append(text, foot);
  return article;
}

export const last = () => Math.max(0, ...story.steps.map((steps) => steps.length));

function tokensAt(index, step) {
  const tokens = story.given.map((token, place) => token && { ...story.fixed.get(place), ...token, given: !story.fixed.has(place) });
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
  const end = last(), focused = document.activeElement?.dataset?.place;
  $("scrub").max = end;
  $("scrub").value = step;
  $("scrub-label").textContent = `step ${step} of ${end}`;
  $("scrub").setAttribute("aria-valuetext", `step ${step} of ${end}`);
  for (const [index, article] of [...$("candidates").children].entries()) {
    const text = article.querySelector(".text"), mine = Math.min(step, story.steps[index].length);
    const holdsFocus = text.contains(document.activeElement);
    text.replaceChildren(...tokensAt(index, mine).map((token, place) => tokenElement(token, place, mine)));
    const first = text.querySelector(".token[data-written]");
    if (first) first.tabIndex = 0;
    if (picked?.index === index) text.querySelector(`[data-place="${picked.place}"]`)?.classList.add("picked");
    if (holdsFocus) focusToken(index, focused);
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
  const fixed = story.fixed.has(place);
  const element = make("span", `token ${fixed ? "fixed" : sureness(token.logprob)}`, token.text);
  if (token.step === step && !fixed) element.classList.add("fresh");
  if (token.text === "" || token.text.startsWith("\n")) element.classList.add(token.text ? "newline" : "unseen");
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
  if (here?.token && [" ", "Enter"].includes(event.key) && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    $("detail").querySelector("button")?.focus();
  }
  if (here?.token && event.key === "Escape") hideDetail();
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

export function focusToken(index, place) {
  const row = $("candidates").children[Math.min(index, story.steps.length - 1)];
  row.querySelector(`.token[data-place="${place}"]`)?.focus({ preventScroll: true });
}

function pick(index, element) {
  if (!element?.token) return;
  unpick();
  const place = Number(element.dataset.place), { token } = element;
  picked = { index, place };
  element.classList.add("picked");
  describe(token, story.fixed.has(place), {
    fix: (other) => fix(index, place, { ...token, ...other }),
    free: () => fix(index, place, null),
    close: () => { unpick(); element.isConnected && element.focus({ preventScroll: true }); hideDetail(); },
  });
  // The details are in front of the text on small screens.
  const below = element.getBoundingClientRect().bottom + 8 - $("detail").getBoundingClientRect().top;
  if (below > 0) scrollBy({ top: below });
}

function unpick() {
  picked = null;
  for (const other of document.querySelectorAll(".picked")) other.classList.remove("picked");
  hideDetail();
}

function play() {
  if (playing) return pause();
  if (story.at >= last()) show(0);
  $("play").textContent = "Pause";
  $("play").setAttribute("aria-label", "Pause");
  playing = setInterval(() => {
    if (story.at >= last()) pause();
    else show(story.at + 1);
  }, Math.max(60, Math.min(400, 6000 / Math.max(1, last()))));
}

export function pause() {
  clearInterval(playing);
  playing = 0;
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
