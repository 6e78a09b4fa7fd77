/* The alternatives of a token, and buttons to fix one of them. */

import { $, button, make, visible } from "./common.js";

const percent = (p) => (p >= 0.0995 ? `${Math.round(100 * p)} %` : `${(100 * p).toPrecision(2)} %`);

/* The most probable tokens, and the sampled one even if it is not among them. */
function choices(token) {
  const alternatives = token.alternatives || [];
  const includesToken = token.logprob === null || token.logprob === undefined || alternatives.some((other) => other.id === token.id);
  return includesToken ? alternatives : [...alternatives, { id: token.id, text: token.text, probability: Math.exp(token.logprob) }];
}

function makeTitle(token, fixed) {
  const title = make("h2", "", fixed ? "stays here, because you chose it" : "");
  const hasLogprob = token.logprob !== null && token.logprob !== undefined;
  if (!fixed) title.append(hasLogprob ? `probability ${percent(Math.exp(token.logprob))}, written in step ${token.step}` : `written in step ${token.step}`);
  title.prepend(make("code", "", visible(token.text)), " ");
  return title;
}

/* A token and its probability; a button to fix it, if it can be. */
function choiceRow(other, maxProbability, chosen, fixToken) {
  const className = chosen ? "choice chosen" : "choice", fix = () => fixToken({ id: other.id, text: other.text, logprob: Math.log(other.probability) });
  const row = fixToken ? button("", fix, className) : make("div", className);
  if (fixToken) row.setAttribute("aria-label", `${visible(other.text)}, ${percent(other.probability)}: keep it here and write the rest anew`);
  if (chosen) row.setAttribute("aria-current", "true");
  const track = make("span", "track"), bar = make("span", "bar");
  bar.style.width = `${100 * other.probability / maxProbability}%`;
  track.append(bar);
  row.append(make("code", "", visible(other.text)), track, make("span", "", percent(other.probability)));
  return row;
}

/* `fixToken` is null where no token can be fixed. */
export function showTokenDetail(token, fixed, { fixToken, releaseToken, close }) {
  const others = choices(token), maxProbability = Math.max(...others.map((other) => other.probability), 1e-12);
  const bars = make("div", "bars");
  bars.append(...others.map((other) => choiceRow(other, maxProbability, other.id === token.id, fixToken)));
  const closeButton = button("✕", close, "close");
  closeButton.setAttribute("aria-label", "Close");
  const advice = fixToken ? "Click one: it stays here, and the rest is written anew around it." : "One alone cannot be kept, because the whole hole has to match.";
  const foot = make("p", "soft", others.length ? advice : "The model was not asked about this token.");
  const parts = [makeTitle(token, fixed), bars, foot, closeButton];
  if (fixed) parts.splice(3, 0, button("Let the model choose again", releaseToken, "small"));
  $("detail").replaceChildren(...parts);
  $("detail").onkeydown = (event) => { if (event.key === "Escape") close(); };
  $("detail").hidden = false;
}

export function hideTokenDetail() {
  $("detail").hidden = true;
  $("detail").replaceChildren();
}
