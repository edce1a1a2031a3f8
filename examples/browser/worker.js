// Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
// The model behind the page, in a thread of its own: reads a prompt, writes bytes, and changes its budget on the way.

import * as ort from "./ort.wasm.bundle.min.mjs";

ort.env.wasm.numThreads = 1; // more would need a server that sends cross-origin isolation headers
const FLUSH_MS = 16; // between two messages with text, and for the page's to come in
const PIECE = 512; // tokens that one call of prefill reads, so that Stop is heard in a long prompt

const request = { budget: null, temperature: 0, stopped: true }; // what the page asks for
const stream = { budget: null, states: null, read: [], larger: null }; // where the text stands, see moveTo
const programs = {}; // by file
let about, weights, opening = Promise.resolve();

const say = (kind, values = {}) => postMessage({ kind, ...values });

async function fetched(name) {
  const response = await fetch(`model/${name}`);
  if (!response.ok) throw new Error(`model/${name}: ${response.status} ${response.statusText}`);
  return response;
}

async function load() {
  about = await (await fetched("export.json")).json();
  if (!about.weights || !Object.values(about.budgets).every(({ step }) => step)) {
    throw new Error("model/export.json: this page runs a language model exported as ONNX");
  }
  const { model } = await (await fetched("tokenizer.json")).json();
  if (model.merges?.length !== 0) throw new Error("this page reads and writes bytes, but the model's tokens are longer");
  weights = new Uint8Array(await (await fetched(about.weights.file)).arrayBuffer());
  say("loaded", { about });
}

/** The session of "prefill" or "step" at a budget. It copies the leading parts of the weights that it reads. */
function program(name, budget) {
  const { file } = about.budgets[budget][name];
  const externalData = [{ path: about.weights.file, data: weights }];
  const open = () => ort.InferenceSession.create(`model/${file}`, { externalData });
  programs[file] ??= opening = opening.then(open, open).catch((error) => {
    delete programs[file]; // so that the next try downloads it again
    throw error;
  }); // one after the other: they share the place of external data
  return programs[file];
}

/** Pairs of a name and a shape (rows, columns): a budget's states, which are leading blocks of a larger one's. */
function stateShapes(budget) {
  const specs = about.budgets[budget].step.inputs.filter(({ name }) => name.startsWith("past."));
  return specs.map(({ name, shape }) => [name, shape.slice(1)]);
}

function emptyStates(budget) {
  const zeros = ([n, m]) => new ort.Tensor("float32", new Float32Array(n * m), [1, n, m]);
  return Object.fromEntries(stateShapes(budget).map(([name, shape]) => [name, zeros(shape)]));
}

/** Whether states hold those of a budget. */
function hold(states, budget) {
  return stateShapes(budget).every(([name, [n, m]]) => states[name].dims[1] >= n && states[name].dims[2] >= m);
}

function leadingStates(states, budget) {
  const cut = emptyStates(budget);
  for (const [name, [n, m]] of stateShapes(budget)) {
    const { data, dims } = states[name];
    for (let i = 0; i < n; i++) cut[name].data.set(data.subarray(i * dims[2], i * dims[2] + m), i * m);
  }
  return cut;
}

/** Read tokens; the logits after the last. */
async function run(name, tokens) {
  const ids = new ort.Tensor("int64", BigInt64Array.from(tokens, BigInt), [1, tokens.length]);
  const inputs = { input_ids: ids, ...stream.states };
  if (name === "prefill") {
    inputs.attention_mask = new ort.Tensor("int64", new BigInt64Array(tokens.length).fill(1n), [1, tokens.length]);
  }
  const { logits, ...present } = await (await program(name, stream.budget)).run(inputs);
  stream.states = Object.fromEntries(Object.entries(present).map(([k, v]) => [k.replace("present.", "past."), v]));
  for (const token of tokens) stream.read.push(token);
  return logits.data;
}

async function prefill(tokens) {
  let logits;
  const piece = Math.min(PIECE, about.max_length);
  for (let i = 0; i < tokens.length && !request.stopped; i += piece) {
    logits = await run("prefill", tokens.slice(i, i + piece));
    await breathe();
  }
  return logits;
}

/**
 * Go on at another budget. Falling, the larger states are put aside; rising again, the tokens since then are read
 * again from there, and all tokens where no states were large enough.
 */
async function moveTo(budget) {
  const { states, read, larger } = stream;
  const size = about.budgets[stream.budget].state_bytes;
  stream.budget = budget;
  if (hold(states, budget)) {
    if (!larger || larger.size <= size) stream.larger = { size, states, count: read.length };
    stream.states = leadingStates(states, budget);
  } else {
    const start = larger && hold(larger.states, budget) ? larger : { states: emptyStates(budget), count: 0 };
    stream.states = leadingStates(start.states, budget);
    say("reading");
    await prefill(read.splice(start.count));
  }
}

/** The likeliest token, or one drawn at a temperature (by Gumbel noise). */
function choose(logits, temperature) {
  const noise = () => -Math.log(-Math.log(Math.random()));
  const scores = temperature ? logits.map((x) => x / temperature + noise()) : logits;
  return scores.reduce((best, score, i) => (score > scores[best] ? i : best), 0);
}

/** Let messages of the page in: wasm holds this thread. A timer would wait for 4 ms. */
function breathe() {
  const { port1, port2 } = new MessageChannel();
  return new Promise((done) => {
    port1.onmessage = () => (port1.close(), done());
    port2.postMessage(null);
  });
}

async function write(prompt) {
  request.stopped = false;
  Object.assign(stream, { budget: request.budget, states: emptyStates(request.budget), read: [], larger: null });
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true }); // keeps the first bytes of a character until the others come
  let bytes = [], count = 0, flushed = performance.now();
  const flush = (final = false) => {
    const seconds = (performance.now() - flushed) / 1000;
    const text = decoder.decode(Uint8Array.from(bytes), { stream: !final });
    say("text", { text, budget: stream.budget, count, seconds });
    [bytes, count, flushed] = [[], 0, performance.now()];
  };
  say("reading");
  const encoded = [...new TextEncoder().encode(prompt)];
  if (!encoded.length && about.bos_token_id === null) throw new Error("write a prompt: no token begins a text of this model");
  let logits = await prefill(encoded.length ? encoded : [about.bos_token_id]);
  await program("step", stream.budget);
  let reason = "stopped";
  say("writing", { budget: stream.budget });
  flushed = performance.now();
  while (!request.stopped) {
    const token = choose(logits, request.temperature);
    if (about.eos_token_ids.includes(token) || stream.read.length >= about.filter_length) {
      reason = stream.read.length < about.filter_length ? "end" : "longest";
      break;
    }
    if (token < 256) bytes.push(token); // others are <pad> and the like
    count++;
    if (request.budget !== stream.budget) {
      flush();
      await moveTo(request.budget);
      await program("step", stream.budget);
      if (request.stopped) break;
      say("writing", { budget: stream.budget });
      flushed = performance.now();
    }
    logits = await run("step", [token]);
    if (performance.now() - flushed > FLUSH_MS) {
      flush();
      await breathe();
    }
  }
  flush(true);
  request.stopped = true;
  say("done", { reason });
}

onmessage = async ({ data: { write: order, ...changes } }) => {
  Object.assign(request, changes);
  try {
    if (order !== undefined) await write(order);
    else if (changes.budget && request.stopped) {
      await program("prefill", request.budget);
      await program("step", request.budget);
      if (request.stopped) say("opened");
    }
  } catch (error) {
    failed(error);
  }
};

function failed(error) {
  request.stopped = true;
  say("failed", { message: error.message ?? String(error) });
}

load().catch(failed);
