/* Playback of a sampler's steps: the candidates, and the slider that moves between steps. */

import { $, button, copyToClipboard, make } from "./common.js";
import { isConstrained } from "./constraint.js";
import { showTokenDetail, hideTokenDetail } from "./token_detail.js";

const MAX_HISTORY = 50;

/* The tokens of each candidate at each step are replayed from the steps' changes. `positions` are the masked
   positions, `fixed` the tokens that the user fixed there, `body` is the request. */
const EMPTY = { given: [], steps: [], results: [], at: 0, following: true, positions: [], fixed: new Map(), body: null, seed: 0, status: "", command: "" };
export let playback = EMPTY;
const earlier = [];
let playing = 0, picked = null, fixToken = () => {};

/* `listener(index, position, token)` is called when the user fixes a token of a candidate. */
export const onTokenFixed = (listener) => { fixToken = listener; };

export function startPlayback(canvas, body, fixed) {
  if (playback.body) earlier.push(playback);
  earlier.splice(0, earlier.length - MAX_HISTORY);
  const positions = canvas.tokens.flatMap((token, position) => (token && !fixed.has(position) ? [] : [position]));
  const perCandidate = (value) => Array.from({ length: canvas.n }, value);
  playback = { ...EMPTY, given: canvas.tokens, steps: perCandidate(() => []), results: perCandidate(() => null), positions, fixed, body, seed: canvas.seed };
  openPlayback(0);
}

/* Show the previous result again. */
export function showPrevious() {
  if (!earlier.length) return;
  playback = earlier.pop();
  $("write-status").textContent = playback.status;
  $("curl").textContent = playback.command;
  openPlayback(lastStep());
}

function openPlayback(step) {
  pause();
  clearPicked();
  $("back").hidden = !earlier.length;
  $("candidates").replaceChildren(...playback.steps.map((_, index) => card(index, playback.seed + index)));
  $("written").hidden = false;
  show(step);
}

function card(index, seed) {
  const article = make("article", "card candidate");
  article.setAttribute("aria-label", `Candidate ${index + 1}`);
  const foot = make("div", "foot");
  const copy = button("Copy the text", () => copyToClipboard(copy, textAtStep(index, Infinity)));
  foot.append(make("span", "", `seed ${seed}`), copy);
  const text = make("div", "text");
  text.setAttribute("role", "group");
  text.addEventListener("click", (event) => pickToken(index, event.target.closest(".token")));
  text.addEventListener("focusin", (event) => pickToken(index, event.target.closest(".token")));
  text.addEventListener("keydown", moveFocus);
  article.append(text, foot);
  return article;
}

export const lastStep = () => Math.max(0, ...playback.steps.map((steps) => steps.length));

function tokensAtStep(index, step) {
  const tokens = playback.given.map((token, position) => token && { ...playback.fixed.get(position), ...token, given: !playback.fixed.has(position) });
  const steps = playback.steps[index];
  for (const [number, changes] of steps.slice(0, step).entries()) {
    for (const change of changes) {
      tokens[change.position] = change.id === null ? null : { ...change, step: number + 1 };
    }
  }
  const result = playback.results[index];
  if (result && step >= steps.length) {
    // Tokens may be parts of a character; the final result has their combined text.
    const finalTokens = result.spans.flatMap((span) => span.tokens);
    let next = 0;
    for (const [position, token] of playback.given.entries()) {
      if (!token && finalTokens[next]) tokens[position] = { ...tokens[position], ...finalTokens[next] };
      if (!token) next += 1;
    }
  }
  return tokens;
}

const textAtStep = (index, step) => tokensAtStep(index, step).map((token) => (token ? token.text : "")).join("");

export function show(step) {
  playback.at = step;
  const end = lastStep(), focused = document.activeElement?.dataset?.position;
  $("scrub").max = end;
  $("scrub").value = step;
  $("scrub-label").textContent = `step ${step} of ${end}`;
  $("scrub").setAttribute("aria-valuetext", `step ${step} of ${end}`);
  for (const [index, article] of [...$("candidates").children].entries()) {
    const text = article.querySelector(".text"), current = Math.min(step, playback.steps[index].length);
    const holdsFocus = text.contains(document.activeElement);
    text.replaceChildren(...tokensAtStep(index, current).map((token, position) => tokenElement(token, position, current)));
    const first = text.querySelector(".token[data-written]");
    if (first) first.tabIndex = 0;
    if (picked?.index === index) text.querySelector(`[data-position="${picked.position}"]`)?.classList.add("picked");
    if (holdsFocus) focusToken(index, focused);
  }
}

function tokenElement(token, position, step) {
  if (!token) {
    const mask = make("span", "token mask");
    mask.setAttribute("role", "img");
    mask.setAttribute("aria-label", "hidden");
    return mask;
  }
  if (token.given) return make("span", "", token.text);
  const fixed = playback.fixed.has(position);
  const element = make("span", `token ${fixed ? "fixed" : confidenceClass(token.logprob)}`, token.text);
  if (token.step === step && !fixed) element.classList.add("fresh");
  if (token.text === "" || token.text.startsWith("\n")) element.classList.add(token.text ? "newline" : "unseen");
  element.dataset.written = "";
  element.dataset.position = position;
  element.tabIndex = -1;
  element.setAttribute("role", "button");
  element.token = token;
  return element;
}

function confidenceClass(logprob) {
  if (logprob === null || logprob === undefined) return "c3";
  const p = Math.exp(logprob);
  return `c${[0.05, 0.15, 0.35, 0.6, 0.85].filter((edge) => p >= edge).length}`;
}

export function moveFocus(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const focusedToken = event.target.closest(".token[data-written]");
  if (focusedToken?.token && [" ", "Enter"].includes(event.key) && !event.ctrlKey && !event.metaKey) {
    event.preventDefault();
    $("detail").querySelector("button")?.focus();
  }
  if (focusedToken?.token && event.key === "Escape") hideTokenDetail();
  if (!step || !focusedToken) return;
  const all = [...event.currentTarget.querySelectorAll(".token[data-written]")];
  const next = all[all.indexOf(focusedToken) + step];
  if (next) {
    focusedToken.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
  event.preventDefault();
}

export function focusToken(index, position) {
  const row = $("candidates").children[Math.min(index, playback.steps.length - 1)];
  row.querySelector(`.token[data-position="${position}"]`)?.focus({ preventScroll: true });
}

function pickToken(index, element) {
  if (!element?.token) return;
  clearPicked();
  const position = Number(element.dataset.position), { token } = element;
  picked = { index, position };
  element.classList.add("picked");
  showTokenDetail(token, playback.fixed.has(position), {
    fixToken: isConstrained(playback.body) ? null : (other) => fixToken(index, position, { ...token, ...other }),
    releaseToken: () => fixToken(index, position, null),
    close: () => { clearPicked(); element.isConnected && element.focus({ preventScroll: true }); hideTokenDetail(); },
  });
  // On small screens the details cover the text.
  const below = element.getBoundingClientRect().bottom + 8 - $("detail").getBoundingClientRect().top;
  if (below > 0) scrollBy({ top: below });
}

function clearPicked() {
  picked = null;
  for (const other of document.querySelectorAll(".picked")) other.classList.remove("picked");
  hideTokenDetail();
}

function play() {
  if (playing) return pause();
  if (playback.at >= lastStep()) show(0);
  $("play").textContent = "Pause";
  $("play").setAttribute("aria-label", "Pause");
  playing = setInterval(() => {
    if (playback.at >= lastStep()) pause();
    else show(playback.at + 1);
  }, Math.max(60, Math.min(400, 6000 / Math.max(1, lastStep()))));
}

export function pause() {
  clearInterval(playing);
  playing = 0;
  $("play").textContent = "Play";
  $("play").setAttribute("aria-label", "Play the steps");
}

export function setUpPlayback() {
  $("scrub").addEventListener("input", () => {
    pause();
    playback.following = Number($("scrub").value) >= lastStep();
    show(Number($("scrub").value));
  });
  $("play").addEventListener("click", play);
}
