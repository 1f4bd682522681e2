"use strict";
// Twice a second: fetch the state, show what has changed. Every string is set as text, never as markup. An element that
// shows a metric bears its name and exact value as data, beside the rounded text.

const POLL_MS = 500;
const PATIENCE_MS = 2500;
const SPAN_S = 300;
const MAX_REQUESTS = 24;
const ROLES = ["prefill", "decode", "colocated"];
const STAGES = ["queue", "reserve", "prefill_queue", "prefill", "transfer", "decode_wait", "decode"];
const SVG = "http://www.w3.org/2000/svg";

// ---------------------------------------------------------------- the loop

let router = "";
let points = [];
let lastAnswerMs = performance.now();

async function follow() {
  for (;;) {
    try {
      show(await newState());
      lastAnswerMs = performance.now();
      contact("");
    } catch (error) {
      contact(`no answer from the router for ${seconds((performance.now() - lastAnswerMs) / 1000)}`);
    }
    await new Promise((resume) => setTimeout(resume, POLL_MS));
  }
}

async function newState() {
  const after = points.length ? points.at(-1).number : 0;
  let state = await fetchState(after);
  if (state.router !== router) { // it was restarted: what we remember is another one's
    router = state.router;
    points = [];
    if (after) state = await fetchState(0);
  }
  points = points.concat(state.points).filter((point) => point.time_s > state.time_s - SPAN_S);
  return state;
}

async function fetchState(after) {
  const answer = await fetch(`dashboard/state?after=${after}`, { signal: AbortSignal.timeout(PATIENCE_MS) });
  if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
  return answer.json();
}

function contact(problem) {
  const badge = document.getElementById("contact");
  badge.hidden = !problem;
  badge.textContent = problem;
  document.body.classList.toggle("stale", Boolean(problem));
}

// ---------------------------------------------------------------- what is shown where

function show(state) {
  document.title = `${state.is_ready ? "" : "not ready: "}pdserve ${state.model}`;
  document.getElementById("model").textContent = state.model;
  document.getElementById("uptime").textContent = `up ${duration(state.uptime_s)}`;
  const ready = document.getElementById("ready");
  ready.textContent = state.is_ready ? "ready" : `not ready: ${state.reason}`;
  ready.className = `badge ${state.is_ready ? "good" : "bad"}`;
  fill("tiles", [state.totals, state.tables, state.latencies, points.at(-1)], () => tiles(state));
  fill("pools", state.workers.map(shownWorker), pools);
  fill("plots", points, () => plots(state.time_s));
  fill("stages", STAGES, (names) => names.map((name) => el("span", {}, key(`stage-${name}`), name.replace("_", " "))));
  fill("requests", state.requests.slice(0, MAX_REQUESTS), requests);
  fill("links", state.pairs, links);
  fill("tables", state.tables, tables);
}

const filled = new Map();

/** Fill an element anew, but only if what it shows has changed: selections and tooltips survive. */
function fill(id, data, render) {
  const now = JSON.stringify(data);
  if (filled.get(id) === now) return;
  filled.set(id, now);
  document.getElementById(id).replaceChildren(...[render(data)].flat());
}

// ---------------------------------------------------------------- totals

function tiles(state) {
  const last = points.at(-1) ?? { requests_per_s: 0, tokens_per_s: 0 };
  const ended = (name) => sum(state.tables.requests_total.filter((row) => row.labels.state === name));
  return [
    tile("requests", number(last.requests_per_s), "/s"),
    tile("tokens", number(last.tokens_per_s), "/s"),
    latency("TTFT", "ttft_seconds", state),
    latency("ITL", "itl_seconds", state),
    latency("TPOT", "tpot_seconds", state),
    total("queued", "queued_requests", state),
    total("active", "active_requests", state),
    tile("finished", count(ended("finished")), "", { metric: "finished", value: ended("finished") }),
    tile("failed", count(ended("failed")), "", { metric: "failed", value: ended("failed") }),
    total("retries", "request_retries_total", state),
    total("migrations", "request_migrations_total", state),
    total("output tokens", "output_tokens_total", state),
  ];
}

function total(name, metric, state) {
  return tile(name, count(state.totals[metric]), "", { metric, value: state.totals[metric] });
}

function latency(name, metric, state) {
  const { recent, all, count: n, sum: s } = state.latencies[metric];
  const [median, tail] = recent[0] === null ? all : recent;
  const since = recent[0] === null ? "since the start" : "last 10 s";
  const made = tile(`${name} p50`, seconds(median), "", { metric, value: n, sum: s });
  made.append(el("div", { class: "soft small" }, n ? `p99 ${seconds(tail)}, ${since}` : "none yet"));
  return made;
}

function tile(name, value, unit, data = {}) {
  return el("div", { class: "panel tile", data },
    el("div", { class: "soft small" }, name),
    el("div", { class: "value" }, value, el("span", { class: "unit" }, unit)));
}

// ---------------------------------------------------------------- workers

/** What a card shows. A heartbeat's age is news only when it is late. */
function shownWorker(worker) {
  const age = worker.metrics.worker_heartbeat_age_seconds ?? 0;
  const metrics = { ...worker.metrics, worker_heartbeat_age_seconds: age < 1 ? 0 : Math.round(age) };
  return { ...worker, metrics, gone_s: worker.gone_s === undefined ? undefined : Math.round(worker.gone_s) };
}

function pools(workers) {
  if (!workers.length) return el("p", { class: "soft" }, "none has registered yet");
  return ROLES.filter((role) => workers.some((worker) => worker.role === role)).map((role) => {
    const pool = workers.filter((worker) => worker.role === role).sort((a, b) => (a.worker < b.worker ? -1 : 1));
    const fit = pool.filter((worker) => worker.state === "fit").length;
    return el("div", { class: "pool", data: { pool: role, fit } },
      el("h3", {}, `${role}: ${fit} of ${pool.length} fit`),
      el("div", { class: "workers" }, ...pool.map(card)));
  });
}

function card(worker) {
  const state = worker.state === "gone" ? `gone for ${duration(worker.gone_s)}` : worker.state;
  const made = el("div", { class: `panel worker ${worker.state}`, data: { worker: worker.worker, state: worker.state } },
    el("div", { class: "name" }, worker.worker, el("span", {}, state)));
  if (worker.reason) made.append(el("div", { class: "small word" }, worker.reason));
  if (worker.state !== "gone") made.append(...load(worker.metrics));
  made.append(el("div", { class: "soft small word" }, `${worker.address}, ${worker.incarnation}`));
  return made;
}

function load(metrics) {
  const [used, all] = [metrics.worker_kv_blocks_used, metrics.worker_kv_blocks];
  const share = all ? used / all : 0;
  const bar = el("div", {});
  bar.style.width = `${100 * share}%`;
  const fact = (name, metric) => el("span", { data: { metric, value: metrics[metric] } },
    el("b", {}, count(metrics[metric])), ` ${name}`);
  const late = metrics.worker_heartbeat_age_seconds;
  return [
    el("div", { class: "gauge", title: "KV blocks that sequences hold" }, bar),
    el("div", { class: "small", data: { metric: "worker_kv_blocks_used", value: used } },
      `KV ${percent(share)}: ${count(used)} of ${count(all)} blocks`),
    el("div", { class: "facts small" },
      fact("running", "worker_running_sequences"), fact("waiting", "worker_waiting_sequences"),
      fact("reserved", "worker_reserved_sequences"), fact("assigned", "worker_assigned_requests"),
      fact("tokens to compute", "worker_uncached_tokens"), fact("blocks cached", "worker_cached_blocks")),
    ...(late ? [el("div", { class: "small warn" }, `last heard of ${duration(late)} ago`)] : []),
  ];
}

// ---------------------------------------------------------------- plots

function plots(nowS) {
  const quantiles = (metric) => [
    { name: "p50", values: points.map((point) => point[metric][0]) },
    { name: "p99", values: points.map((point) => point[metric][1]) },
  ];
  const line = (name, field) => ({ name, values: points.map((point) => point[field]) });
  return [
    plot("TTFT", nowS, seconds, quantiles("ttft_seconds")),
    plot("ITL", nowS, seconds, quantiles("itl_seconds")),
    plot("TPOT", nowS, seconds, quantiles("tpot_seconds")),
    plot("Tokens/s", nowS, number, [line("sent", "tokens_per_s")]),
    plot("Requests/s", nowS, number, [line("ended", "requests_per_s")]),
    plot("Requests", nowS, number, [line("active", "active"), line("queued", "queued")]),
  ];
}

function plot(title, nowS, format, series) {
  const [width, height, left, bottom] = [340, 120, 46, 16];
  const highest = Math.max(0, ...series.flatMap((each) => each.values.filter((value) => value !== null)));
  const top = ceiling(highest);
  const x = (index) => left + (width - left - 4) * (1 - (nowS - points[index].time_s) / SPAN_S);
  const y = (value) => 8 + (height - bottom - 8) * (1 - value / top);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  for (const share of [0, 0.5, 1]) {
    drawing.append(svg("line", { class: "grid", x1: left, x2: width - 4, y1: y(share * top), y2: y(share * top) }));
    drawing.append(svg("text", { class: "end", x: left - 5, y: y(share * top) + 3 }, format(share * top)));
  }
  for (const [label, share] of [["−5 min", 0], ["now", 1]]) {
    const place = left + (width - left - 4) * share;
    drawing.append(svg("text", { class: share ? "end" : "", x: place, y: height - 3 }, label));
  }
  series.forEach(({ values }, index) => {
    const path = values.map((value, i) => {
      if (value === null) return "";
      const isFirst = i === 0 || values[i - 1] === null;
      return `${isFirst ? "M" : "L"}${x(i).toFixed(1)} ${y(value).toFixed(1)}`;
    }).join("");
    drawing.append(svg("path", { class: `line series${index}`, d: path }));
  });
  const legend = series.map(({ name, values }, index) =>
    el("span", {}, key(`series${index}`), `${name} ${values.length ? format(values.at(-1)) : "–"}`));
  return el("div", { class: "panel" }, el("h3", {}, el("b", {}, title), ...legend), drawing);
}

/** The next of 1, 2, 5, 10, 20, ... */
function ceiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value * 0.999) * power;
}

// ---------------------------------------------------------------- requests

function requests(views) {
  if (!views.length) return el("p", { class: "soft" }, "none yet");
  const longest = Math.max(...views.map((view) => view.end_to_end_s));
  return views.map((view) => el("div", { class: "request", data: { request: view.request_id, state: view.state } },
    el("div", { class: "id", title: view.request_id },
      el("span", { class: STATES[view.state] ?? "" }, view.error ? `${view.state}: ${view.error}` : view.state),
      el("span", { class: "soft small" }, ` ${view.request_id}`)),
    timeline(view, longest),
    el("div", { class: "small about", title: about(view) }, about(view))));
}

const STATES = { finished: "good", failed: "bad", cancelled: "warn" };

function about(view) {
  const who = view.prefill_worker ? `${view.prefill_worker} → ${view.decode_worker}` : view.decode_worker;
  const parts = [
    `${count(view.prompt_tokens)} → ${count(view.output_tokens)} tokens`,
    `TTFT ${seconds(view.ttft_s)}`, `TPOT ${seconds(view.tpot_s)}`, `all ${seconds(view.end_to_end_s)}`,
  ];
  if (who) parts.push(who);
  if (view.placement && !view.prefill_worker) parts.push(view.placement.replace("decode: ", ""));
  if (view.cached_tokens) parts.push(`${count(view.cached_tokens)} cached`);
  if (view.attempts > 1) parts.push(`${view.attempts} attempts, ${view.migrations} in the middle`);
  return parts.join(" · ");
}

function timeline(view, longest) {
  const width = 1000;
  const scale = width / (longest || 1);
  const drawing = svg("svg", { viewBox: `0 0 ${width} 10`, preserveAspectRatio: "none", role: "img",
    "aria-label": view.stages.map(([name, start, end]) => `${name} ${seconds(end - start)}`).join(", ") });
  for (const [name, start, end] of view.stages) {
    const length = Math.max(0.6, (end - start) * scale);
    const bar = svg("rect", { class: `stage-${name}`, x: start * scale, width: length, height: 10 });
    bar.append(svg("title", {}, `${name}: ${seconds(end - start)}`));
    drawing.append(bar);
  }
  return drawing;
}

// ---------------------------------------------------------------- tables

function links(pairs) {
  if (!pairs.length) return el("p", { class: "soft" }, "no pairs of prefill and decode workers");
  const rows = pairs.map((pair) => {
    const { link_bytes_total: carried, link_bytes_per_second: speed, link_round_trip_seconds: trip } = pair.metrics;
    const row = [
      `${pair.prefill} → ${pair.decode}`,
      el("span", { class: { good: "good", refused: "bad" }[pair.standing] ?? "warn" }, pair.standing),
      pair.transport || "–",
      speed === undefined ? "–" : `${number(speed / 1e9)} GB/s`,
      trip === undefined ? "–" : seconds(trip),
      `${bytes(pair.now_bytes_per_second)}/s`,
      carried === undefined ? "–" : bytes(carried),
      el("span", { class: "word" }, pair.reason),
    ];
    return { cells: row, data: { pair: `${pair.prefill} ${pair.decode}`, standing: pair.standing, value: carried } };
  });
  return table(["pair", "self-test", "over", "measured", "round trip", "last 10 s", "carried", ""], rows, [3, 4, 5, 6]);
}

function tables(counted) {
  const counts = (title, metric, label) => countsOf(title, counted[metric], label, metric);
  return [
    counts("Who computed prompts, and why", "placements_total", (l) => `${l.computed_by}: ${l.reason}`),
    counts("How requests ended", "requests_total", (l) => (l.error ? `${l.state}: ${l.error}` : l.state)),
    counts("What was tried again", "request_retries_total", (l) => l.error),
    counts("Refused before it was a request", "refusals_total", (l) => l.error),
    counts("Self-tests of pairs", "pair_checks_total", (l) => l.result),
  ];
}

function countsOf(title, rows, label, metric) {
  const all = sum(rows);
  const shown = rows.map((row) => ({
    cells: [el("span", { class: "word" }, label(row.labels)), count(row.value), percent(all ? row.value / all : 0)],
    data: { metric, label: label(row.labels), value: row.value },
  }));
  const body = rows.length ? table([], shown, [1, 2]) : el("p", { class: "soft small" }, "nothing");
  return el("div", { class: "panel" }, el("h3", {}, title), body);
}

function table(names, rows, numeric) {
  const cell = (tag) => (content, index) => el(tag, { class: numeric.includes(index) ? "number" : "" }, content);
  const body = rows.map((row) => el("tr", { data: row.data }, ...row.cells.map(cell("td"))));
  const made = el("table", {}, el("tbody", {}, ...body));
  if (names.length) made.prepend(el("thead", {}, el("tr", {}, ...names.map(cell("th")))));
  return made;
}

// ---------------------------------------------------------------- elements and numbers

function el(tag, { class: classes, title, data } = {}, ...children) {
  const made = document.createElement(tag);
  if (classes) made.className = classes;
  if (title) made.title = title;
  Object.assign(made.dataset, data ?? {});
  made.append(...children);
  return made;
}

function svg(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function key(classes) {
  return el("span", { class: `key ${classes}` });
}

function sum(rows) {
  return rows.reduce((all, row) => all + row.value, 0);
}

function count(value) {
  return Math.round(value ?? 0).toLocaleString("en");
}

function number(value) {
  if (value >= 100 || Number.isInteger(value)) return count(value);
  return value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

function percent(share) {
  return `${(100 * share).toFixed(share && share < 0.1 ? 1 : 0)} %`;
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return value < 100 ? `${value.toFixed(value < 10 ? 2 : 1)} s` : duration(value);
}

function duration(value) {
  const whole = Math.round(value);
  if (whole < 100) return `${whole} s`;
  if (whole < 6000) return `${Math.floor(whole / 60)} min`;
  return whole < 172800 ? `${Math.floor(whole / 3600)} h` : `${Math.floor(whole / 86400)} days`;
}

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const step = value ? Math.min(units.length - 1, Math.floor(Math.log10(value) / 3)) : 0;
  return `${number(value / 1000 ** step)} ${units[step]}`;
}

follow();
