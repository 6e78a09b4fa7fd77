/* What each sampler does, in one sentence, and whether it takes a number of steps. */

const SAMPLERS = {
  ancestral: ["in each step, a random part of the hidden tokens is written", true],
  "first-hitting": ["one token after the other, in random order", false],
  "random-order": ["in random order, equally many tokens in each step", true],
  confidence: ["what the model is surest of first, equally many tokens in each step", true],
  threshold: ["in each step everything that the model is sure enough of", false],
  factor: ["in each step as many tokens as the model is sure of together", false],
  "entropy-bounded": ["in each step as many tokens as leave little open", false],
  "joint-threshold": ["everything that the model is sure enough of is written, and what it now doubts is corrected", false],
  remdm: ["tokens may be hidden again and written anew, which corrects mistakes", true],
  autoregressive: ["from left to right, one token after the other", false],
  blockwise: ["block after block, from left to right", true],
  "uniform-ancestral": ["all holes are written in every step, and corrected in the next", true],
  "ratio-ancestral": ["all holes are written in every step, and corrected in the next", true],
};

/* The sampler `name` in a sentence; `ownWithoutSteps`: that of the model, “default”, takes none. */
export function samplerHelp(name, defaultSampler, ownWithoutSteps) {
  const isDefault = name === "default";
  const [description, usuallyTakesSteps] = SAMPLERS[isDefault ? defaultSampler : name] || ["", true];
  const takesSteps = usuallyTakesSteps && !(isDefault && ownWithoutSteps);
  const label = [isDefault ? `For this model, “default” is ${defaultSampler}` : `The sampler ${name}`, description].filter(Boolean).join(": ");
  return { text: takesSteps ? `${label}.` : `${label}. It takes as many steps as it needs.`, takesSteps };
}
