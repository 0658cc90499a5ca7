"use strict";
// A panel shows one text: an array of tokens with their values from the server. The page is drawn from these arrays;
// text from the server or the user is never interpreted as HTML.
(() => {
  const byId = (id) => document.getElementById(id);
  const LN2 = Math.log(2);
  const IMPOSSIBLE = -9999; // minus infinity in JSON
  const SHADES = 9; // one per nat; the last one is for everything above
  const MAX_STRIP = 1200; // maximum tokens in the strip
  const FIELDS = ["text-a", "text-b", "model", "max-tokens", "temperature", "top-p", "seed", "top", "schema", "stage"];
  const CHECKS = ["compare", "chat"];
  const panels = [];
  const talks = [[], []]; // earlier messages of the conversations, by panel
  let hasOpened = false; // the link in the address bar was read
  let shown = null; // the form of the result on the page, for its link
  let running = null; // AbortController of the requests in progress
  let hand = null; // { panel, position } of the selected token

  // ---- the server ------------------------------------------------------------------------------------------

  function headers() {
    const key = byId("key").value;
    return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  }

  async function failureOf(response) {
    const text = await response.text();
    let message = text;
    try {
      const { error } = JSON.parse(text);
      message = error.param ? `${error.param}: ${error.message}` : error.message;
    } catch (cause) {
      if (!(cause instanceof SyntaxError || cause instanceof TypeError)) throw cause;
    }
    if (response.status === 401) byId("connection").open = true;
    return new Error(message || `the server replied with status ${response.status}`);
  }

  async function get(path) {
    const response = await fetch(path, { headers: headers() });
    if (!response.ok) throw await failureOf(response);
    return response.json();
  }

  async function* events(body, signal) {
    const response = await fetch(body.messages ? "/v1/chat/completions" : "/v1/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(body), signal,
    });
    if (!response.ok) throw await failureOf(response);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
        if (!data || data === "[DONE]") continue;
        const event = JSON.parse(data);
        if (event.error) throw new Error(event.error.message);
        yield event;
      }
    }
  }

  function question(prompt, maxTokens) {
    const top = Number(byId("top").value);
    const asked = { model: byId("model").value || undefined, max_tokens: maxTokens, stream: true };
    const ofPrompt = { prompt, prompt_logprobs: top, prompt_rows: true, entropy: true, return_token_ids: true };
    if (maxTokens === 0) return { ...asked, ...ofPrompt };
    const drawn = {
      logprobs_mode: "both", temperature: Number(byId("temperature").value), top_p: Number(byId("top-p").value),
      seed: Number(byId("seed").value || shown.fields.seed), ...formOf(byId("schema").value),
    };
    if (!isChat(prompt)) return { ...asked, ...ofPrompt, ...drawn, logprobs: top };
    return { ...asked, ...drawn, messages: prompt, logprobs: true, top_logprobs: top };
  }

  // A prompt is a text, token ids, or the messages of a chat.
  const isChat = (prompt) => typeof prompt[0] === "object";

  function formOf(schema) {
    if (!schema.trim()) return {};
    const form = { type: "json_schema", json_schema: { name: "answer", schema: parsed(schema) } };
    return { response_format: form, field_logprobs: "members" };
  }

  function parsed(schema) {
    try {
      return JSON.parse(schema);
    } catch (cause) {
      throw new Error(`JSON schema: ${cause.message}`);
    }
  }

  // ---- tokens ----------------------------------------------------------------------------------------------

  function promptTokens(choice) {
    return choice.prompt_token_ids.map((id, position) => {
      const row = choice.prompt_rows[position];
      const entropy = choice.prompt_entropy ? choice.prompt_entropy[position] : null;
      return row
        ? { id, text: row.token, bytes: row.bytes, logprob: row.logprob, rank: row.rank, entropy, top: row.top_logprobs }
        : { id, text: null, bytes: null, logprob: null, rank: null, entropy: null, top: [] };
    });
  }

  function newTokens(choice) {
    const rows = choice.logprobs;
    if (!rows) return [];
    const alternatives = (map) => Object.entries(map ?? {})
      .map(([text, logprob]) => ({ text, logprob })).sort((a, b) => b.logprob - a.logprob);
    return rows.tokens.map((text, row) => ({
      id: choice.token_ids[row], text, bytes: null, logprob: rows.token_logprobs[row], rank: null,
      entropy: rows.entropy ? rows.entropy[row] : null, top: alternatives(rows.top_logprobs[row]), isNew: true,
      processed: rows.processed && {
        logprob: rows.processed.token_logprobs[row], top: alternatives(rows.processed.top_logprobs[row]),
      },
    }));
  }

  function chatTokens(choice) {
    const rows = choice.logprobs;
    if (!rows) return [];
    const calls = (rows.tool_calls ?? []).map((call, place) => [call, rows.processed_tool_calls?.[place], "call"]);
    const channels = [[rows.reasoning, rows.processed_reasoning, "reasoning"], [rows.content, rows.processed_content], ...calls];
    return channels.flatMap(([raw, processed, channel]) => (raw ?? []).map((row, place) => ({
      text: row.token, bytes: row.bytes, logprob: row.logprob, rank: null, entropy: null, top: named(row), isNew: true, channel,
      processed: processed && { logprob: processed[place].logprob, top: named(processed[place]) },
    })));
  }

  const named = (row) => row.top_logprobs.map(({ token, logprob }) => ({ text: token, logprob }));

  async function nameFirst(tokens, signal) {
    // The first token is not scored, so it has no row with its text.
    if (!tokens.length || tokens[0].text !== null) return;
    const response = await fetch("/detokenize", {
      method: "POST", headers: headers(), signal,
      body: JSON.stringify({ model: byId("model").value || undefined, tokens: [tokens[0].id] }),
    });
    if (!response.ok) throw await failureOf(response);
    tokens[0].text = (await response.json()).prompt;
    tokens[0].bytes = [...new TextEncoder().encode(tokens[0].text)];
  }

  async function fill(panel, prompt, maxTokens, signal) {
    const version = { tokens: [], label: "", fields: null, reply: "" };
    panel.versions.push(version);
    panel.current = version;
    for await (const event of events(question(prompt, maxTokens), signal)) {
      for (const choice of event.choices) {
        if (choice.prompt_token_ids) {
          version.tokens = promptTokens(choice);
          await nameFirst(version.tokens, signal);
        }
        version.tokens.push(...(isChat(prompt) ? chatTokens(choice) : newTokens(choice)));
        version.reply += choice.delta?.content ?? "";
        if (choice.fields) version.fields = fieldsOf(choice.fields, version.tokens);
      }
      draw(panel);
    }
    if (maxTokens > 0 && !isChat(prompt)) await nameRanks(panel, version, signal);
    draw(panel);
  }

  function fieldsOf(fields, tokens) {
    const first = tokens.findIndex((token) => token.isNew);
    return fields.map((field) => ({ ...field, tokens: field.tokens.map((place) => first + place) }));
  }

  async function nameRanks(panel, version, signal) {
    // Score the generated tokens as a prompt, for ranks, ids of alternatives and exact bytes; the logprobs are the same.
    const ids = version.tokens.map((token) => token.id);
    for await (const event of events(question(ids, 0), signal)) {
      for (const choice of event.choices) {
        if (!choice.prompt_rows) continue;
        promptTokens(choice).forEach((scored, position) => {
          const token = version.tokens[position];
          if (!token.isNew) return;
          Object.assign(token, { bytes: scored.bytes, rank: scored.rank, top: scored.top });
        });
      }
    }
  }

  // ---- user actions ----------------------------------------------------------------------------------------

  async function work(jobs) {
    if (running) running.abort();
    const own = new AbortController();
    running = own;
    say("");
    byId("error").hidden = true;
    busy(true);
    const began = performance.now();
    try {
      await Promise.all(jobs(own.signal));
      say(`done in ${((performance.now() - began) / 1000).toFixed(2)} s`);
    } catch (error) {
      own.abort();
      if (error.name === "AbortError") say("stopped; the text so far is kept");
      else complain(error);
    } finally {
      if (running === own) {
        running = null;
        busy(false);
      }
    }
  }

  function ask(maxTokens) {
    const texts = [byId("text-a").value, ...(byId("compare").checked ? [byId("text-b").value] : [])];
    const isTalk = byId("chat").checked && maxTokens > 0;
    shown = stateOf(maxTokens);
    panels.length = 0;
    hand = null;
    byId("panels").replaceChildren();
    byId("panels").classList.toggle("two", texts.length > 1);
    showHint();
    texts.forEach((text, number) => panels.push(makePanel(texts.length > 1 ? "AB"[number] : "")));
    return work((signal) => panels.map(async (panel, number) => {
      if (!isTalk) return fill(panel, texts[number], maxTokens, signal);
      const messages = [...talks[number], { role: "user", content: texts[number] }];
      drawTalk(panel, messages);
      await fill(panel, messages, maxTokens, signal);
      talks[number] = [...messages, { role: "assistant", content: panel.current.reply }];
      byId(["text-a", "text-b"][number]).value = "";
      showTalk();
    }));
  }

  function showTalk() {
    byId("reset").hidden = !talks.some((messages) => messages.length);
    byId("text-label").textContent = byId("chat").checked ? (talks[0].length ? "Next message" : "Message") : "Text or prompt";
  }

  function forgetTalk() {
    talks.forEach((_, number) => { talks[number] = []; });
    showTalk();
  }

  // ---- links -----------------------------------------------------------------------------------------------

  function stateOf(maxTokens) {
    const fields = Object.fromEntries(FIELDS.map((id) => [id, byId(id).value]));
    // Without a seed, one is chosen, so that the link gives the same tokens.
    if (fields.seed === "") fields.seed = String(Math.floor(Math.random() * 2 ** 31));
    const checks = Object.fromEntries(CHECKS.map((id) => [id, byId(id).checked]));
    return { fields, checks, talks: [...talks], isScore: maxTokens === 0 };
  }

  async function copyLink() {
    const link = new URL(location.href);
    link.hash = encodeURIComponent(JSON.stringify(shown));
    history.replaceState(null, "", link);
    try {
      await navigator.clipboard.writeText(link.href);
      say("the link is copied; it repeats this request");
    } catch {
      say("the link is in the address bar; it repeats this request");
    }
  }

  function openLink() {
    // Nothing is sent before a button is pressed: any web page may link here.
    if (location.hash.length < 2 || hasOpened) return;
    hasOpened = true;
    try {
      const state = JSON.parse(decodeURIComponent(location.hash.slice(1)));
      for (const id of FIELDS) byId(id).value = String(state.fields[id] ?? "");
      for (const id of CHECKS) byId(id).checked = state.checks[id] === true;
      state.talks.slice(0, talks.length).forEach((messages, number) => {
        talks[number] = messages.map(({ role, content }) => ({ role: String(role), content: String(content) }));
      });
      byId("field-b").hidden = !byId("compare").checked;
      byId("form").open = byId("schema").value !== "";
      showTalk();
      say(`opened from a link; press “${state.isScore ? byId("score").textContent : byId("go").textContent}” to compute it`);
    } catch (error) {
      complain(new Error(`the link is not valid (${error.message})`));
    }
  }

  function branch(panel, position, alternative) {
    const before = panel.current.tokens.slice(0, position);
    const label = `${visible(before.at(-1)?.text ?? "")} → ${visible(alternative.text)}`;
    const ids = [...before.map((token) => token.id), alternative.id];
    return work((signal) => {
      const filled = fill(panel, ids, Number(byId("max-tokens").value), signal);
      panel.current.label = label;
      return [filled.then(() => take(panel, position, true))];
    });
  }

  function busy(isBusy) {
    byId("stop").hidden = !isBusy;
    byId("go").disabled = isBusy;
    byId("score").disabled = isBusy;
    for (const id of ["csv", "json", "link"]) byId(id).disabled = isBusy || !panels.some((panel) => panel.current?.tokens.length);
  }

  function say(text) {
    byId("status").textContent = text;
  }

  function complain(error) {
    const text = error instanceof TypeError ? `cannot reach the server (${error.message})` : error.message;
    byId("error").textContent = text;
    byId("error").hidden = false;
  }

  // ---- drawing ---------------------------------------------------------------------------------------------

  function make(name, properties = {}, ...children) {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(properties)) {
      if (key.includes("-")) element.setAttribute(key, value);
      else element[key] = value;
    }
    element.append(...children);
    return element;
  }

  const visible = (text) => JSON.stringify(text).slice(1, -1).replaceAll('\\"', '"').replace(/^ | $/g, "␣");
  const number = (value, digits = 3) => (value <= IMPOSSIBLE ? "−∞" : value.toFixed(digits).replace("-", "−"));
  const percent = (logprob) => {
    const p = 100 * Math.exp(logprob);
    return p >= 0.01 || p === 0 ? `${p.toFixed(2)} %` : `${p.toExponential(1)} %`;
  };
  const isProcessed = () => byId("stage").value === "processed";
  const logprobOf = (token) => (isProcessed() && token.processed ? token.processed.logprob : token.logprob);
  const shadeOf = (logprob) => Math.min(SHADES - 1, Math.max(0, Math.floor(-logprob)));

  function makePanel(title) {
    const panel = { title, versions: [], current: null, shown: null, spans: [] };
    panel.talk = make("div", { className: "talk" });
    panel.text = make("div", { className: "tokens", role: "group", "aria-label": `Tokens${title && ` of ${title}`}` });
    panel.strip = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    panel.strip.setAttribute("class", "strip");
    panel.strip.setAttribute("role", "img");
    panel.strip.setAttribute("preserveAspectRatio", "none");
    panel.fields = make("div", { className: "fields" });
    panel.totals = make("dl", { className: "totals" });
    panel.branches = make("ul", { className: "branches", "aria-label": "Branches" });
    const head = title ? [make("h2", { textContent: `Text ${title}` })] : [];
    panel.box = make("section", { className: "panel" }, ...head, panel.talk, panel.text, panel.strip, panel.fields, panel.totals, panel.branches);
    panel.text.addEventListener("keydown", (event) => walk(panel, event));
    byId("panels").append(panel.box);
    return panel;
  }

  function drawTalk(panel, messages) {
    panel.talk.replaceChildren(...messages.map(({ role, content }) =>
      make("p", {}, make("b", { textContent: role }), make("span", { textContent: content }))));
  }

  function draw(panel) {
    const { tokens } = panel.current;
    if (panel.shown !== panel.current) {
      panel.text.replaceChildren();
      panel.spans = [];
      panel.reasoning = null;
      panel.shown = panel.current;
    }
    const shades = fieldShades(panel.current);
    tokens.forEach((token, position) => {
      const span = panel.spans[position] ?? addSpan(panel, position, token.channel);
      const logprob = logprobOf(token);
      const shade = shades && token.isNew ? shades.get(position) ?? null : logprob;
      span.textContent = token.text ?? "";
      span.className = `token ${shade === null ? "" : `s${shadeOf(shade)}`} ${token.isNew ? "new" : ""}`;
      span.setAttribute("aria-label", spoken(token, logprob));
    });
    if (hand && hand.panel === panel) mark(panel, hand.position);
    drawStrip(panel);
    drawFields(panel);
    drawTotals(panel);
    drawReasoning(panel);
    drawBranches(panel);
  }

  // In a JSON answer, each value has one shade, by the sum over its tokens; tokens between values have none.
  const isLeaf = (field) => "value" in field;
  const logprobOfField = (field) => (isProcessed() ? field.processed_logprob ?? field.logprob : field.logprob);

  function fieldShades({ fields }) {
    if (!fields) return null;
    const shades = new Map();
    for (const field of fields.filter(isLeaf)) {
      for (let place = field.tokens[0]; place < field.tokens[1]; place += 1) shades.set(place, logprobOfField(field));
    }
    return shades;
  }

  function spoken(token, logprob) {
    if (logprob === null) return `${visible(token.text ?? "")}, the first token`;
    return `${visible(token.text)}, surprisal ${number(-logprob, 2)} nats`;
  }

  function addSpan(panel, position, channel) {
    const span = make("span", { role: "button", tabIndex: position ? -1 : 0, "data-position": position });
    span.addEventListener("mouseenter", () => take(panel, position, false));
    span.addEventListener("focus", () => take(panel, position, false));
    span.addEventListener("click", () => take(panel, position, true));
    (channel === "reasoning" ? reasoningOf(panel) : panel.text).append(span);
    panel.spans.push(span);
    return span;
  }

  function reasoningOf(panel) {
    panel.reasoning ??= make("details", { className: "reasoning" }, make("summary"));
    if (!panel.reasoning.isConnected) panel.text.prepend(panel.reasoning);
    return panel.reasoning;
  }

  function walk(panel, event) {
    const last = panel.spans.length - 1;
    const position = Number(event.target.dataset.position);
    const next = {
      ArrowRight: Math.min(position + 1, last), ArrowLeft: Math.max(position - 1, 0), Home: 0, End: last,
    }[event.key];
    if (next !== undefined) {
      panel.spans[next].focus();
      event.preventDefault();
    } else if (event.key === "Enter" || event.key === " ") {
      byId("detail").querySelector(".bars button")?.focus();
      event.preventDefault();
    }
  }

  function mark(panel, position) {
    for (const one of panels) {
      one.spans.forEach((span) => span.classList.remove("at"));
      one.strip.querySelector(".at")?.classList.remove("at");
    }
    panel.spans.forEach((span, place) => { span.tabIndex = place === position ? 0 : -1; });
    panel.spans[position]?.classList.add("at");
    panel.strip.querySelector(`[data-position="${position}"]`)?.classList.add("at");
  }

  function take(panel, position, isFocused) {
    if (!panel.current.tokens[position]) return;
    hand = { panel, position };
    mark(panel, position);
    if (isFocused) panel.spans[position].focus();
    drawDetail(panel, position);
  }

  function showHint() {
    const text = "Point at a token, or use the arrow keys, to see its probability, rank and alternatives here. "
      + "Select an alternative to continue from it.";
    byId("detail").replaceChildren(make("p", { className: "hint", textContent: text }));
  }

  function drawDetail(panel, position) {
    const token = panel.current.tokens[position];
    const facts = make("dl");
    const fact = (name, value) => facts.append(make("dt", { textContent: name }), make("dd", { textContent: value }));
    if (token.logprob === null) {
      fact("logprob", "none (first token)");
    } else {
      fact("logprob", `${number(token.logprob, 4)} nats (${percent(token.logprob)})`);
      fact("surprisal", `${number(-token.logprob)} nats, ${number(-token.logprob / LN2)} bits`);
      if (token.processed) fact("processed", `${number(token.processed.logprob, 4)} nats (${percent(token.processed.logprob)})`);
      if (token.rank !== null) fact("rank", String(token.rank));
      if (token.entropy !== null) fact("entropy", `${number(token.entropy)} nats`);
    }
    if (token.id !== undefined) fact("token id", String(token.id));
    if (token.channel) fact("channel", token.channel === "call" ? "tool call" : token.channel);
    fact("position", String(position));
    if (token.bytes) fact("bytes", token.bytes.map((byte) => byte.toString(16).padStart(2, "0")).join(" ") || "none");
    const stages = make("div", { className: "stages" });
    if (token.top.length) stages.append(drawBars(panel, position, token, token.top, token.processed ? "Raw" : "Alternatives"));
    if (token.processed) stages.append(drawBars(panel, position, token, token.processed.top, "Processed"));
    const heading = make("h2", { textContent: `“${visible(token.text ?? "")}”` });
    byId("detail").replaceChildren(heading, facts, stages);
  }

  function drawBars(panel, position, token, top, title) {
    const list = make("ul", { className: "bars" });
    for (const entry of top) {
      const isChosen = entry.id === undefined && entry.token_id === undefined ? entry.text === token.text : idOf(entry) === token.id;
      const alternative = { id: idOf(entry), text: entry.token ?? entry.text };
      const isBranch = alternative.id !== undefined && !isChosen;
      const label = [make("b", { textContent: visible(alternative.text) }), make("em", { textContent: percent(entry.logprob) })];
      const row = make(isBranch ? "button" : "span", {
        className: `bar ${isChosen ? "chosen" : ""} ${title === "Processed" ? "second" : ""}`,
        title: `${number(entry.logprob, 4)} nats${isBranch ? "; continue from here with this token" : ""}`,
      }, ...label);
      row.style.setProperty("--p", `${100 * Math.exp(entry.logprob)}%`);
      if (isBranch) {
        row.type = "button";
        row.addEventListener("click", () => branch(panel, position, alternative));
        row.addEventListener("keydown", (event) => {
          if (event.key === "Escape") panel.spans[position].focus();
        });
      }
      list.append(make("li", {}, row));
    }
    return make("section", {}, make("h3", { textContent: title }), list);
  }

  const idOf = (entry) => entry.token_id ?? entry.id;

  function drawStrip(panel) {
    const tokens = panel.current.tokens.slice(0, MAX_STRIP);
    const height = 100;
    const most = Math.max(SHADES - 1, ...tokens.map((token) => (token.logprob > IMPOSSIBLE ? -(logprobOf(token) ?? 0) : 0)));
    const shapes = [];
    tokens.forEach((token, position) => {
      const surprisal = Math.min(most, -(logprobOf(token) ?? 0));
      const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      const tall = (height * surprisal) / most;
      for (const [key, value] of Object.entries({
        x: position + 0.1, y: height - tall, width: 0.8, height: tall, "data-position": position,
      })) bar.setAttribute(key, value);
      shapes.push(bar);
    });
    panel.strip.setAttribute("viewBox", `0 0 ${Math.max(tokens.length, 24)} ${height}`);
    panel.strip.setAttribute("aria-label", `Surprisal of each token, up to ${number(most, 1)} nats`);
    panel.strip.replaceChildren(...shapes);
  }

  function drawReasoning(panel) {
    if (!panel.reasoning) return;
    const totals = totalsOf(panel.current.tokens.filter((token) => token.channel === "reasoning"));
    const said = `reasoning: ${totals.tokens} tokens, ${number(-totals.sum)} nats, ${number(totals.mean)} per token`;
    panel.reasoning.querySelector("summary").textContent = said;
  }

  function drawFields(panel) {
    const { fields } = panel.current;
    panel.fields.replaceChildren(...(fields ?? []).filter(isLeaf).map((field) => {
      const logprob = logprobOfField(field);
      const name = make("code", { textContent: field.pointer || "whole answer" });
      const value = make("b", { className: `s${shadeOf(logprob)}`, textContent: JSON.stringify(field.value) });
      const row = make("button", { type: "button", title: `${number(logprob, 4)} nats; go to its least likely token` },
        name, value, make("em", { textContent: percent(logprob) }));
      row.addEventListener("click", () => take(panel, leastSure(panel, field), true));
      return make("div", {}, row, ...drawMembers(field));
    }));
  }

  function leastSure(panel, field) {
    const places = Array.from({ length: field.tokens[1] - field.tokens[0] }, (_, place) => field.tokens[0] + place);
    return places.reduce((least, place) =>
      (logprobOf(panel.current.tokens[place]) < logprobOf(panel.current.tokens[least]) ? place : least), places[0]);
  }

  function drawMembers(field) {
    if (!field.members?.length) return [];
    const sections = [drawShares(field, "Raw share", "share", "logprob", "")];
    if ("grammar_share" in field.members[0]) {
      sections.push(drawShares(field, "Share under the schema", "grammar_share", "grammar_logprob", "second"));
    }
    return [make("div", { className: "shares" }, ...sections)];
  }

  function drawShares(field, title, shareName, logprobName, style) {
    const list = make("ul", { className: "bars", "aria-label": `${title} of the allowed values of ${field.pointer || "the answer"}` });
    for (const member of field.members) {
      const isSaid = JSON.stringify(member.value) === JSON.stringify(field.value);
      const share = member[shareName] ?? 0;
      const bar = make("span", { className: `bar ${isSaid ? "chosen" : ""} ${style}`, title: `${number(member[logprobName], 4)} nats` },
        make("b", { textContent: JSON.stringify(member.value) }), make("em", { textContent: `${(100 * share).toFixed(2)} %` }));
      bar.style.setProperty("--p", `${100 * share}%`);
      list.append(make("li", {}, bar));
    }
    return make("section", {}, make("h3", { textContent: title }), list);
  }

  function totalsOf(tokens) {
    const scored = tokens.filter((token) => token.logprob !== null);
    const sum = scored.reduce((total, token) => total + logprobOf(token), 0);
    const numBytes = scored.reduce((total, token) => total + (token.bytes ? token.bytes.length : NaN), 0);
    const mean = -sum / scored.length;
    return {
      tokens: tokens.length, scored: scored.length, sum, mean, perplexity: Math.exp(mean),
      bitsPerByte: numBytes ? -sum / LN2 / numBytes : NaN,
    };
  }

  function drawTotals(panel) {
    const totals = totalsOf(panel.current.tokens.filter((token) => token.channel !== "reasoning"));
    const entries = [["tokens", String(totals.tokens)]];
    if (totals.scored) {
      entries.push(["logprob", `${number(totals.sum)} nats`], ["perplexity", number(totals.perplexity)]);
      entries.push(["mean surprisal", `${number(totals.mean)} nats, ${number(totals.mean / LN2)} bits`]);
      if (Number.isFinite(totals.bitsPerByte)) entries.push(["bits per byte", number(totals.bitsPerByte)]);
    }
    panel.totals.replaceChildren(...entries.map(([name, value]) =>
      make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value }))));
  }

  function drawBranches(panel) {
    if (panel.versions.length < 2) return;
    panel.branches.replaceChildren(...panel.versions.map((version, place) => {
      const button = make("button", { type: "button", textContent: version.label || (place ? "branch" : "first") });
      if (version === panel.current) button.setAttribute("aria-current", "true");
      button.addEventListener("click", () => {
        panel.current = version;
        hand = null;
        showHint();
        draw(panel);
      });
      return make("li", {}, button);
    }));
  }

  function drawLegend() {
    byId("legend-cells").replaceChildren(...Array.from({ length: SHADES }, (_, shade) => {
      const more = shade === SHADES - 1 ? "+" : "";
      const cell = make("i", { className: `s${shade}` });
      return make("li", {}, cell, `${shade}${more}`, make("br"), `${number(shade / LN2, 1)}${more}`);
    }));
  }

  // ---- files -----------------------------------------------------------------------------------------------

  function save(name, type, text) {
    const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
    link.click();
    URL.revokeObjectURL(link.href);
  }

  function rowsOf(panel) {
    return panel.current.tokens.map((token, position) => ({
      text: panel.title || "A", position, token_id: token.id ?? null, token: token.text, bytes: token.bytes,
      logprob: token.logprob, rank: token.rank, entropy: token.entropy, is_generated: Boolean(token.isNew),
      processed_logprob: token.processed ? token.processed.logprob : null,
      top_logprobs: token.top.map((entry) => ({ token_id: idOf(entry) ?? null, token: entry.token ?? entry.text, logprob: entry.logprob })),
    }));
  }

  function saveCsv() {
    // Write texts and lists as JSON: exact, and spreadsheets cannot interpret a token as a formula.
    const cell = (value) => {
      const text = value === null ? "" : typeof value === "number" || typeof value === "boolean" ? String(value) : JSON.stringify(value);
      return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
    };
    const rows = panels.flatMap(rowsOf);
    const lines = [Object.keys(rows[0]), ...rows.map((row) => Object.values(row).map(cell))];
    save("logprobe.csv", "text/csv", `${lines.map((line) => line.join(",")).join("\r\n")}\r\n`);
  }

  function saveJson() {
    const found = {
      model: byId("model").value, unit: "nats", stage: byId("stage").value,
      texts: panels.map((panel) => ({ text: panel.title || "A", totals: totalsOf(panel.current.tokens), fields: panel.current.fields, tokens: rowsOf(panel) })),
    };
    save("logprobe.json", "application/json", JSON.stringify(found, null, 1));
  }

  // ---- start -----------------------------------------------------------------------------------------------

  async function connect() {
    try {
      byId("error").hidden = true;
      const [models, capabilities] = await Promise.all([get("/v1/models"), get("/v1/capabilities")]);
      byId("model").replaceChildren(...models.data.map(({ id }) => make("option", { value: id, textContent: id })));
      byId("model-line").textContent = `exact token log-probabilities of ${models.data[0].id}`;
      byId("top").max = capabilities.max_logprobs;
      byId("top").value = Math.min(Number(byId("top").value), capabilities.max_logprobs);
      openLink();
      document.body.dataset.ready = "true";
    } catch (error) {
      complain(error);
    }
  }

  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask(Number(byId("max-tokens").value));
  });
  byId("score").addEventListener("click", () => byId("ask").reportValidity() && ask(0));
  byId("stop").addEventListener("click", () => running?.abort());
  byId("compare").addEventListener("change", () => { byId("field-b").hidden = !byId("compare").checked; });
  byId("chat").addEventListener("change", forgetTalk);
  byId("reset").addEventListener("click", forgetTalk);
  byId("link").addEventListener("click", copyLink);
  byId("stage").addEventListener("change", () => panels.forEach((panel) => panel.current && draw(panel)));
  byId("csv").addEventListener("click", saveCsv);
  byId("json").addEventListener("click", saveJson);
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    connect();
  });
  for (const id of ["text-a", "text-b"]) {
    byId(id).addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
    });
  }
  drawLegend();
  connect();
})();
