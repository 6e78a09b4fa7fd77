/* The options of requests that write text. Every form has the same ones; their bounds and, where nothing plainer is
   said here, their explanations are those of the API's own description (/openapi.json), and what fits the model is its
   card's. */

import { $, make } from "./common.js";
import { model } from "./api.js";
import { labelled, makeSelect, readNumber, setChoices } from "./form.js";
import { choicesChanged, keepField, keepList } from "./state.js";
import { samplerHelp } from "./samplers.js";

const BASIC = [
  { param: "n", label: "Candidates", value: 1, required: true, title: "How many versions are written, side by side" },
  { param: "steps", label: "Steps", value: 32, required: true, title: "More steps are slower and usually better",
    help: "The model looks at the text once in each step and writes some of the hidden tokens. More steps are slower and usually better. A step in which nothing would be written is left out, so that fewer may be taken than you asked for." },
  { param: "sampler", label: "Sampler", isList: true, title: "In which order tokens are written" },
  { param: "temperature", label: "Temperature", value: 1, step: 0.05, required: true, title: "Below 1 the text is more likely, above 1 more surprising",
    help: "Below 1 the model takes likely tokens more often, at 0 always the most likely one; above 1 it takes more risks." },
  { param: "top_p", label: "Top p", value: 0.95, step: 0.01, required: true, title: "Leaves unlikely tokens out; 1 leaves out none",
    help: "Only the most likely tokens are taken that have this probability together; 1 allows all." },
  { param: "seed", label: "Seed", min: 0, max: Number.MAX_SAFE_INTEGER, empty: "any", title: "The same seed and settings give the same text",
    help: "A number that decides all random choices: the same seed gives the same text again. If it is empty, each try is a new one." },
];
const FURTHER = [
  { param: "top_k", label: "Top k", empty: "all", title: "Leaves out all but so many most likely tokens" },
  { param: "cfg_scale", label: "Guidance", value: 0, step: 0.1, required: true, title: "How much more the text follows what is given" },
  { param: "block_size", label: "Block size", empty: "no blocks", title: "Writes from left to right, so many tokens at a time" },
  { param: "sub_block_size", label: "Part of a block", empty: "whole", title: "Writes each block from left to right, so many tokens at a time" },
  { param: "cache", label: "Cache", isList: true, title: "What the steps of a block do not read again, to be faster" },
];
const SAMPLING = ["steps", "temperature", "top_p", "top_k"]; // the model's own values are shown as values
const IN_BLOCKS = ["sub_block_size", "cache"];

/* The controls of one form. Ids of controls are those of the API's fields, after `prefix`. */
export class Options {
  constructor(prefix, { only = () => true, values = {} } = {}) {
    this.prefix = prefix;
    this.basic = BASIC.filter(({ param }) => only(param));
    this.all = [...this.basic, ...FURTHER];
    this.values = values;
    $(`${prefix}options`).append(...this.basic.map((option) => this.#control(option)));
    $(`${prefix}further`).append(...FURTHER.map((option) => this.#control(option)));
    this.field("sampler").setAttribute("aria-describedby", `${prefix}sampler-help`);
    for (const param of ["sampler", "block_size"]) {
      for (const kind of ["input", "change"]) this.field(param).addEventListener(kind, () => this.#adapt());
    }
    for (const option of this.all) (option.isList ? keepList : keepField)(this.field(option.param).id);
  }

  field(param) {
    return $(this.prefix + param.replaceAll("_", "-"));
  }

  #control({ param, label, isList, value, step, min, max, required = false, empty = "", title }) {
    const control = isList ? makeSelect([]) : make("input");
    if (!isList) {
      const given = String(this.values[param] ?? value ?? "");
      Object.assign(control, { type: "number", required, placeholder: empty, defaultValue: given, value: given });
      for (const [name, bound] of Object.entries({ min, max, step })) if (bound !== undefined) control[name] = bound;
    }
    return labelled(control, label, { id: this.prefix + param.replaceAll("_", "-"), param, title, className: param === "sampler" ? "wide" : "" });
  }

  /* Bounds and explanations of the API, once they are known. */
  describe(schema) {
    for (const { param, label, help, title, isList, min, max } of this.all) {
      const facts = schema.properties[param], numbers = facts.anyOf?.find((kind) => kind.type !== "null") ?? facts;
      if (!isList) {
        this.field(param).min = min ?? numbers.minimum;
        this.field(param).max = max ?? numbers.maximum ?? "";
      }
      const list = $(`${this.prefix}help`).querySelector("dl");
      list.append(make("dt", "", label), make("dd", "", help ?? (BASIC.some((each) => each.param === param) ? `${title}.` : facts.description.replaceAll("`", ""))));
    }
  }

  /* What fits the chosen model, and its own values where nothing else was typed. */
  showModel() {
    const { limits, samplers, default_sampler: name, defaults, caches } = model;
    for (const param of ["n", "steps"]) if (this.field(param)) this.field(param).max = limits[param];
    setChoices(this.field("sampler"), samplers.map((each) => [each, each === "default" ? `default: ${name}` : each]));
    setChoices(this.field("cache"), caches.map((each) => [each, each]));
    this.field("cache").closest("label").hidden = caches.length < 2;
    const ownParams = "temperature" in defaults; // the model comes with a sampler, whose values are better than ours
    for (const { param, value } of this.all.filter((option) => SAMPLING.includes(option.param))) {
      const ours = this.values[param] ?? value ?? "", own = defaults[param] ?? (param === "top_p" ? 1 : ours);
      setDefault(this.field(param), String(ownParams ? own : ours));
    }
    for (const param of ["sampler", "cache"]) choicesChanged(this.field(param));
    this.#adapt();
  }

  /* Controls without an effect are disabled; empty ones show what the model does then. */
  #adapt() {
    const { defaults, caches, default_sampler: name } = model, sampler = this.field("sampler").value;
    if (!sampler) return; // no card yet
    const own = sampler === "default" || caches.length < 2 ? defaults : {}; // a sampler that is named is not the model's own
    const blockSize = this.field("block_size").value, inBlocks = blockSize !== "" || own.block_size !== undefined;
    const { text, takesSteps } = samplerHelp(sampler, name, "temperature" in defaults && !("steps" in defaults));
    this.field("steps").disabled = !takesSteps;
    const told = sampler === "default" && blockSize !== "" ? "Block after block is written, from left to right." : text;
    $(`${this.prefix}sampler-help`).textContent = takesSteps && inBlocks ? `${told} The steps are those of a block.` : told;
    for (const { param, empty } of FURTHER.filter((each) => each.param.includes("block"))) this.field(param).placeholder = own[param] ?? empty;
    for (const param of IN_BLOCKS) this.field(param).disabled = !inBlocks;
  }

  /* The fields of a request. */
  read() {
    const read = ({ param, isList }) => {
      const field = this.field(param);
      return [param, !isList ? readNumber(field) : field.disabled ? undefined : field.value];
    };
    const neutral = { cache: "none", cfg_scale: 0 };
    return Object.fromEntries(this.all.map(read).filter(([param, value]) => value !== undefined && value !== neutral[param]));
  }

  /* How many of the further options are set. */
  countFurther() {
    return FURTHER.filter(({ param, isList }) => {
      const field = this.field(param);
      return !field.disabled && field.value !== (isList ? field.options[0]?.value ?? "" : field.defaultValue);
    }).length;
  }
}

/* Another default of a field, which it shows unless something was typed into it. */
export function setDefault(field, value) {
  const untouched = field.value === field.defaultValue;
  field.defaultValue = value;
  if (untouched) field.value = value;
}
