/* What else was possible where a token stands, and the way to have it there. */

import { $, button, make, visible } from "./common.js";

const percent = (p) => (p >= 0.0995 ? `${Math.round(100 * p)} %` : `${(100 * p).toPrecision(2)} %`);

/* The tokens that the model was surest of, and the one that was drawn, even if it is none of them. */
function possible(token) {
  const listed = token.alternatives || [];
  const drawn = token.logprob === null || token.logprob === undefined || listed.some((other) => other.id === token.id);
  return drawn ? listed : [...listed, { id: token.id, text: token.text, probability: Math.exp(token.logprob) }];
}

function headline(token, fixed) {
  const title = make("h2", "", fixed ? "stays here, because you chose it" : "");
  const known = token.logprob !== null && token.logprob !== undefined;
  if (!fixed) title.append(known ? `probability ${percent(Math.exp(token.logprob))}, written in step ${token.step}` : `written in step ${token.step}`);
  title.prepend(make("code", "", visible(token.text)), " ");
  return title;
}

function choice(other, most, chosen, fix) {
  const row = button("", () => fix({ id: other.id, text: other.text, logprob: Math.log(other.probability) }), chosen ? "choice chosen" : "choice");
  row.setAttribute("aria-label", `${visible(other.text)}, ${percent(other.probability)}: keep it here and write the rest anew`);
  if (chosen) row.setAttribute("aria-current", "true");
  const track = make("span", "track"), bar = make("span", "bar");
  bar.style.width = `${100 * other.probability / most}%`;
  track.append(bar);
  row.append(make("code", "", visible(other.text)), track, make("span", "", percent(other.probability)));
  return row;
}

export function describe(token, fixed, { fix, free, close }) {
  const others = possible(token), most = Math.max(...others.map((other) => other.probability), 1e-12);
  const bars = make("div", "bars");
  bars.append(...others.map((other) => choice(other, most, other.id === token.id, fix)));
  const shut = button("✕", close, "close");
  shut.setAttribute("aria-label", "Close");
  const foot = make("p", "soft", others.length ? "Click one: it stays here, and the rest is written anew around it." : "The model was not asked about this token.");
  const parts = [headline(token, fixed), bars, foot, shut];
  if (fixed) parts.splice(3, 0, button("Let the model choose again", free, "small"));
  $("detail").replaceChildren(...parts);
  $("detail").onkeydown = (event) => { if (event.key === "Escape") close(); };
  $("detail").hidden = false;
}

export function hideDetail() {
  $("detail").hidden = true;
  $("detail").replaceChildren();
}
