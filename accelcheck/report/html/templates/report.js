"use strict";
/* Filters, the list of cases, a page for each case, and the plots. Texts of journals enter by textContent alone. */
(() => {
  const PAGE = 100; // rows of the list on a page
  const MOST_BARS = 24; // views in a case's plot
  const MOST_NAMES = 60; // marks with their names beside them
  const root = document.documentElement;
  const byId = (name) => document.getElementById(name);

  function el(name, properties, ...children) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(properties || {})) {
      if (value === undefined || value === null || value === false) continue;
      if (key === "class") node.className = value;
      else if (key === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
      else node.setAttribute(key, value === true ? "" : value);
    }
    for (const child of children.flat()) {
      if (child !== null && child !== undefined && child !== false) node.append(child); // a text becomes a text node
    }
    return node;
  }

  async function unpacked(name) {
    const packed = atob(byId(name).textContent);
    const bytes = new Uint8Array(packed.length);
    for (let at = 0; at < packed.length; at += 1) bytes[at] = packed.charCodeAt(at);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  /* Numbers, formatted like those of Python's tables. */

  const real = (value) => (value === "inf" ? Infinity : value === "-inf" ? -Infinity : value === "nan" ? NaN : value);
  function figure(value, digits = 3) {
    if (value === null || value === undefined) return "";
    if (typeof value === "string") return value;
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e6 || size < 1e-3) return value.toExponential(digits - 1).replace(/e([+-])(\d)$/, "e$10$2");
    return String(Number(value.toPrecision(digits)));
  }
  function duration(value) {
    if (typeof value !== "number") return figure(value);
    for (const [unit, factor] of [["s", 1], ["ms", 1e3], ["us", 1e6]]) {
      if (value * factor >= 1) return `${figure(value * factor)} ${unit}`;
    }
    return value === 0 ? "0 s" : `${figure(value * 1e9)} ns`;
  }
  function inUnit(value, unit) {
    if (value === null) return "";
    if (unit === "s") return duration(value);
    if (unit === "B") return value < 16384 ? `${value} B` : `${figure(value / 1048576, 4)} MiB`;
    if (unit === "x") return `${figure(value, 4)}x`;
    if (unit === "part") return `${figure(100 * value)} %`;
    return unit === "1" ? figure(value, 6) : `${figure(value, 4)} ${unit}`;
  }
  /* Share of a budget: per cent, and from ten times on a factor. */
  const share = (value) => (typeof value === "string" || !Number.isFinite(value) ? "beyond" : value < 10 ? `${figure(100 * value)} %` : `${figure(value)}x`);
  const count = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;

  /* Cases. */

  let index;
  let texts;
  let columns;
  let size = 0;
  let words = []; // of each case, for the filter by text
  const blocks = new Map();
  const filter = { text: "", verdict: "", run: "", technique: "", family: "", dtype: "", mode: "", workload: "", cause: "" };
  let order = "worst";
  let page = 0;
  let chosen = [];

  const part = (name, at) => texts[columns[name][at]];
  const verdictOf = (at) => index.verdicts[columns.verdict[at]];
  const idOf = (at) =>
    `${part("technique", at)}/${part("workload", at)}/${index.devices[columns.run[at]]}/${part("dtype", at)}/${index.modes[columns.mode[at]]}`;

  async function detail(at) {
    const number = Math.floor(at / index.block);
    if (!blocks.has(number)) blocks.set(number, unpacked(`block-${number}`));
    const block = await blocks.get(number);
    const text = (which) => block.texts[which];
    const [reason, traceback, remark, code, digest, compared, excess, command, evidence, figures, left, seconds, measured, times] =
      block.rows[at % index.block];
    const groups = (flat, length) => Array.from({ length: flat.length / length }, (_, n) => flat.slice(n * length, (n + 1) * length));
    return {
      reason: text(reason), traceback: text(traceback), remark: text(remark), code: text(code), digest: text(digest), compared, excess,
      command: text(command), left, times,
      evidence: groups(evidence, 3).map(([claim, seen, engaged]) => ({
        claim: text(claim), observed: Array.isArray(seen) ? text(seen[0]) : String(seen), engaged: engaged === 1,
      })),
      figures: groups(figures, 6).map(([path, view, found, allowed, where, gates]) => ({
        path: text(path), view: text(view), measured: found, allowed, where: text(where), gates: gates === 1,
        within: real(found) <= real(allowed),
      })),
      seconds: groups(seconds, 2).map(([phase, spent]) => [text(phase), spent]),
      measurements: groups(measured, 6).map(([name, value, unit, low, high, why]) => ({
        name: text(name), value, unit: text(unit), low, high, reason: text(why),
      })),
    };
  }

  const chip = (verdict, number) =>
    el("span", { class: `chip v-${verdict}` },
      el("span", { class: "sign", "aria-hidden": "true" }, index.symbols[verdict]), number === undefined ? verdict : `${number.toLocaleString("en")} ${verdict}`);

  function matching() {
    const wanted = filter.text.toLowerCase().split(/\s+/).filter(Boolean);
    const equal = [];
    for (const name of ["technique", "family", "dtype", "workload"]) {
      if (filter[name] !== "") equal.push([columns[name], texts.indexOf(filter[name])]);
    }
    if (filter.mode !== "") equal.push([columns.mode, index.modes.indexOf(filter.mode)]);
    if (filter.run !== "") equal.push([columns.run, Number(filter.run)]);
    const against = new Set(index.against.map((name) => index.verdicts.indexOf(name)));
    const verdict = index.verdicts.indexOf(filter.verdict);
    const cause = filter.cause === "" ? null : Number(filter.cause);
    const found = [];
    for (let at = 0; at < size; at += 1) {
      if (filter.verdict === "against" ? !against.has(columns.verdict[at]) : filter.verdict !== "" && columns.verdict[at] !== verdict) continue;
      if (cause !== null && !columns.cause[at].includes(cause)) continue;
      if (!equal.every(([column, value]) => column[at] === value)) continue;
      if (wanted.length && !wanted.every((word) => words[at].includes(word))) continue;
      found.push(at);
    }
    return found;
  }

  const ORDERS = {
    worst: ["worst verdict", (a, b) => columns.verdict[a] - columns.verdict[b] || a - b],
    used: ["most of the budget used", (a, b) => number("used", b) - number("used", a) || a - b],
    slow: ["longest", (a, b) => number("seconds", b) - number("seconds", a) || a - b],
    fast: ["largest speed-up", (a, b) => number("speed", b) - number("speed", a) || a - b],
    name: ["name", (a, b) => (idOf(a) < idOf(b) ? -1 : 1)],
  };
  function number(name, at) {
    const value = real(columns[name][at]);
    return value === null || Number.isNaN(value) ? -1 : value === Infinity ? Number.MAX_VALUE : value;
  }

  function select(name, label, options) {
    const box = el("select", { name, on: { change: () => changed(name, box.value) } }, el("option", { value: "" }, "all"),
      options.map(([value, shown]) => el("option", { value }, shown)));
    return el("label", {}, label, box);
  }
  const distinct = (name) => [...new Set(columns[name])].map((which) => texts[which]).sort().map((word) => [word, word]);

  function controls() {
    const search = el("input", { type: "search", name: "text", autocomplete: "off", spellcheck: "false", on: { input: () => changed("text", search.value) } });
    const present = [...new Set(columns.verdict)].sort((a, b) => a - b).map((which) => index.verdicts[which]);
    const form = el("form", { class: "filters", role: "search", "aria-label": "Filter cases", on: { submit: (event) => event.preventDefault() } },
      el("label", { class: "wide" }, "text in id or reason", search),
      select("verdict", "verdict", [["against", "against the device"], ...present.map((word) => [word, word])]),
      index.runs.length > 1 && select("run", "device", index.runs.map((name, which) => [String(which), name])),
      select("family", "family", distinct("family")),
      select("technique", "technique", distinct("technique")),
      select("workload", "workload", distinct("workload")),
      new Set(columns.dtype).size > 1 && select("dtype", "dtype", distinct("dtype")),
      select("mode", "mode", [...new Set(columns.mode)].sort((a, b) => a - b).map((which) => [index.modes[which], index.modes[which]])),
      index.causes.length > 0 && select("cause", "cause", index.causes.map((title, which) => [String(which), `${which + 1}. ${title.slice(0, 60)}`])),
      el("button", { type: "button", on: { click: () => { for (const name of Object.keys(filter)) filter[name] = ""; page = 0; address(); shown(); } } }, "Clear"));
    byId("filters").append(form, el("p", { class: "soft", id: "matches", role: "status" }));
  }

  let later = 0;
  function changed(name, value) {
    filter[name] = value;
    page = 0;
    clearTimeout(later);
    later = setTimeout(() => { address(); shown(); }, name === "text" ? 120 : 0);
  }

  function address() {
    const set = Object.entries(filter).filter(([, value]) => value !== "");
    const hash = set.length ? `#cases=&${new URLSearchParams(set)}` : "#matrix";
    try { history.replaceState(null, "", hash); } catch { /* a browser that keeps the address of a file as it is */ }
  }

  function shown() {
    for (const [name, value] of Object.entries(filter)) {
      const box = byId("filters").querySelector(`[name="${name}"]`);
      if (box && box.value !== value) box.value = value;
    }
    chosen = matching();
    byId("matches").textContent = chosen.length === size ? `${count(size, "case")}.` : `${chosen.length.toLocaleString("en")} of ${count(size, "case")}.`;
    grid();
    rows();
  }

  let cells;
  function grid() {
    const body = byId("grid").tBodies[0];
    if (!cells) {
      cells = new Map();
      for (const row of body.rows) cells.set(row.cells[0].textContent, row);
    }
    const tally = new Map();
    for (const at of chosen) {
      const technique = part("technique", at);
      if (!tally.has(technique)) tally.set(technique, index.runs.map(() => new Map()));
      const cell = tally.get(technique)[columns.run[at]];
      cell.set(columns.verdict[at], (cell.get(columns.verdict[at]) || 0) + 1);
    }
    for (const [technique, row] of cells) {
      const counts = tally.get(technique);
      row.hidden = !counts;
      if (!counts) continue;
      counts.forEach((cell, run) => {
        const place = row.cells[run + 1];
        if (place.dataset.whole === undefined) {
          place.dataset.whole = String([...cell.values()].reduce((sum, one) => sum + one, 0));
          place.dataset.code = place.lastElementChild && place.lastElementChild.className === "soft" ? place.lastElementChild.textContent : "";
        }
        const link = new URLSearchParams({ cases: "", technique, ...(index.runs.length > 1 ? { run } : {}) });
        place.replaceChildren(...(cell.size
          ? [el("a", { href: `#${link}` }, [...cell].sort(([a], [b]) => a - b).flatMap(([verdict, many]) => [chip(index.verdicts[verdict], many), " "])),
            place.dataset.code && el("span", { class: "soft" }, place.dataset.code)].filter(Boolean)
          : [el("span", { class: "soft" }, "no case")]));
      });
    }
  }

  function toCase(at) {
    const label = index.runs[columns.run[at]];
    return [
      el("a", { class: "id", href: `#case=${encodeURIComponent(idOf(at))}&run=${columns.run[at]}` }, idOf(at)),
      label === index.devices[columns.run[at]] ? null : el("div", { class: "soft label" }, label),
    ];
  }

  function rows() {
    const ordered = [...chosen].sort(ORDERS[order][1]);
    const pages = Math.max(1, Math.ceil(ordered.length / PAGE));
    page = Math.min(page, pages - 1);
    const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.turn : undefined;
    const turn = (by, word) => el("button", { type: "button", "data-turn": word, disabled: page + by < 0 || page + by >= pages,
      on: { click: () => { page += by; rows(); } } }, word);
    const box = el("select", { on: { change: () => { order = box.value; page = 0; rows(); } } },
      Object.entries(ORDERS).map(([name, [title]]) => el("option", { value: name, selected: name === order }, title)));
    const active = [...byId("filters").querySelectorAll("label")].map((label) => label.lastElementChild).filter((box) => box.value !== "")
      .map((box) => `${box.parentElement.firstChild.textContent}: ${box.selectedOptions ? box.selectedOptions[0].textContent : box.value}`);
    const head = ["verdict", "case", "reason"].map((name) => el("th", { scope: "col" }, name));
    const right = ["budget used", "speed-up", "time"].map((name) => el("th", { scope: "col", class: "num" }, name));
    byId("list").replaceChildren(
      el("div", { class: "bar" },
        el("label", { class: "soft" }, "sorted by ", box), turn(-1, "Previous"), turn(1, "Next"),
        el("p", { class: "soft", "aria-live": "polite" }, ordered.length
          ? `${(page * PAGE + 1).toLocaleString("en")} to ${Math.min(ordered.length, (page + 1) * PAGE).toLocaleString("en")} of ${count(ordered.length, "case")}`
          : "No case matches the filters."),
        el("p", { class: "soft" }, active.length ? `filtered by ${active.join(", ")}; ` : "", el("a", { href: "#matrix" }, active.length ? "change the filters" : "filters"))),
      ordered.length ? el("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Cases" },
        el("table", {}, el("thead", {}, el("tr", {}, head, right)), el("tbody", {},
          ordered.slice(page * PAGE, (page + 1) * PAGE).map((at) => el("tr", {},
            el("td", {}, chip(verdictOf(at))), el("th", { scope: "row" }, toCase(at)), el("td", { class: "text soft" }, el("div", { class: "clamp" }, part("note", at))),
            el("td", { class: "num" }, columns.used[at] === null ? "" : share(columns.used[at])),
            el("td", { class: "num" }, columns.speed[at] === null ? "" : `${figure(columns.speed[at])}x`),
            el("td", { class: "num" }, columns.seconds[at] ? duration(columns.seconds[at]) : "")))))) : "");
    if (focused) byId("list").querySelector(`[data-turn="${focused}"]`)?.focus();
  }

  /* The page of a case. */

  function table(label, head, body, right = []) {
    const kind = (which) => (right.includes(which) ? "num" : undefined);
    return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, el("table", {},
      el("thead", {}, el("tr", {}, head.map((name, which) => el("th", { scope: "col", class: kind(which) }, name)))),
      el("tbody", {}, body.map((cellsOf) => el("tr", {}, cellsOf.map((cell, which) =>
        el(which === 0 ? "th" : "td", { scope: which === 0 ? "row" : undefined, class: kind(which) }, cell)))))));
  }

  function copyable(code) {
    const box = el("div", { class: "command" }, code);
    const text = code.textContent;
    const button = el("button", { type: "button", on: { click: async () => {
      try { await navigator.clipboard.writeText(text); } catch {
        const range = document.createRange();
        range.selectNodeContents(code);
        getSelection().removeAllRanges();
        getSelection().addRange(range);
        document.execCommand("copy");
      }
      button.textContent = "Copied";
      byId("said").textContent = "The command is in the clipboard.";
      setTimeout(() => { button.textContent = "Copy"; byId("said").textContent = ""; }, 1500);
    } } }, "Copy");
    box.append(button);
    return box;
  }

  async function open(id, run) {
    let at = -1;
    for (let one = 0; one < size && at < 0; one += 1) if ((run === null || columns.run[one] === Number(run)) && idOf(one) === id) at = one;
    const place = byId("page");
    const back = el("p", {}, el("a", { href: "#cases" }, "← All cases"));
    if (at < 0) {
      place.replaceChildren(back, el("h2", {}, "No such case"), el("p", {}, "The journals have no case ", el("code", {}, id), "."));
      return view(place, "No such case");
    }
    const found = await detail(at);
    const verdict = verdictOf(at);
    const timed = found.measurements.length > 0;
    const gates = found.figures.filter((one) => one.gates);
    const rank = (one) => { const used = real(one.allowed) > 0 ? real(one.measured) / real(one.allowed) : real(one.measured) === 0 ? 0 : Infinity; return Number.isNaN(used) ? Infinity : used; };
    const plotted = [...found.figures].filter((one) => real(one.measured) > 0 && Number.isFinite(real(one.measured)) && real(one.allowed) > 0 && Number.isFinite(real(one.allowed)))
      .sort((a, b) => rank(b) - rank(a)).slice(0, MOST_BARS);
    const ratios = found.measurements.filter((one) => one.unit === "x" && one.value !== null && one.low !== null && one.high !== null);
    place.replaceChildren(
      back,
      el("h2", { tabindex: "-1", id: "case-title" }, chip(verdict), " ", el("span", { class: "id" }, id)),
      el("dl", {}, [
        ["device", index.runs[columns.run[at]]], ["family", part("family", at)], ["level", String(columns.level[at])],
        ["compared", count(found.compared, "element")], found.excess && ["eager's error / samples'", figure(found.excess)],
        found.digest && ["digest of the work", found.digest], found.code && ["code", found.code],
        ...columns.cause[at].map((which) => ["cause", el("a", { href: `#cases=&cause=${which}` }, index.causes[which])]),
      ].filter(Boolean).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
      el("h3", {}, "Reproduce"), copyable(el("code", {}, found.command)),
      found.remark && el("p", { class: "note" }, found.remark),
      ...(found.reason ? [el("h3", {}, "Reason"), el("pre", { tabindex: "0" }, found.reason)] : []),
      ...(found.traceback ? [el("h3", {}, "Traceback"), el("pre", { tabindex: "0" }, found.traceback)] : []),
      ...(found.figures.length ? [
        el("h3", {}, "Views against their budgets"),
        el("p", { class: "soft" }, gates.some((one) => !one.within)
          ? `${count(gates.filter((one) => !one.within).length, "view")} beyond the budget.`
          : "Every view that can fail the case is within its budget.", found.left ? ` ${found.left} more figures are in the journal.` : ""),
        plotted.length && plot((canvas) => viewsPlot(canvas, plotted), "Views against their budgets; the table below has the numbers", plotted.length * 26 + 70),
        el("details", { open: true }, el("summary", {}, "The numbers"), table("Views", ["view", "tensor", "measured", "budget", "of the budget", "worst place", "within"],
          found.figures.map((one) => [one.view, one.path, figure(one.measured, 4), figure(one.allowed, 4),
            share(rank(one)), one.where,
            one.within ? "yes" : one.gates ? el("span", { class: "beyond" }, "✗ beyond") : "beyond, not a gate"]), [2, 3, 4])),
      ] : []),
      ...(found.evidence.length ? [
        el("h3", {}, "Evidence that the technique ran"),
        table("Evidence", ["claim", "seen", "holds"], found.evidence.map((one) => [one.claim, one.observed, one.claim.startsWith("could not be seen: ") ? "not known" : one.engaged ? "✓ yes" : el("span", { class: "beyond" }, "✗ no")])),
      ] : []),
      ...(timed ? [
        el("h3", {}, "Time and memory"),
        ratios.length && plot((canvas) => ratiosPlot(canvas, ratios), "Ratios with their intervals; the table below has the numbers", ratios.length * 40 + 80),
        table("Measurements", ["figure", "value", "interval", "remark"], found.measurements.map((one) => [one.name,
          one.value === null ? "not known" : inUnit(one.value, one.unit), one.low === null || one.high === null ? "" : `${inUnit(one.low, one.unit)} to ${inUnit(one.high, one.unit)}`, one.reason]), [1, 2]),
      ] : []),
      ...(found.times.length > 1 ? [
        el("h3", {}, "Seconds a call, block by block"),
        plot((canvas) => timesPlot(canvas, found.times), "Seconds a call in each block; the numbers are below", 260),
        el("details", {}, el("summary", {}, "The numbers"), table("Blocks", ["block", "time of a call"], found.times.map((one, which) => [String(which + 1), duration(one)]), [1])),
      ] : []),
      ...(found.seconds.length ? [
        el("h3", {}, "Wall time by phase"),
        found.seconds.some(([, spent]) => spent > 0) && plot((canvas) => phasesPlot(canvas, found.seconds), "Seconds by phase; the table below has the numbers", found.seconds.length * 26 + 60),
        el("details", {}, el("summary", {}, "The numbers"), table("Seconds", ["phase", "time"], found.seconds.map(([phase, spent]) => [phase, duration(spent)]), [1])),
      ] : []),
    );
    view(place, id);
  }

  function view(place, title) {
    byId("overview").hidden = true;
    place.hidden = false;
    document.title = `${title} - accelcheck`;
    drawn(place);
    scrollTo({ top: 0, behavior: "instant" });
    place.focus({ preventScroll: true });
  }

  /* Plots: drawn when they come into view, and again when the colours change. */

  const charts = new Map();
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) { seen.unobserve(entry.target); draw(entry.target); }
  }, { rootMargin: "300px" });
  const drawings = new WeakMap();
  function plot(make, label, height) {
    const box = el("div", { class: "plot" });
    box.style.height = `${height}px`; // by the object model, which the policy allows; no style attribute is parsed
    drawings.set(box, make);
    box.dataset.label = label;
    return box;
  }
  function drawn(place) {
    for (const [canvas, chart] of charts) if (!canvas.isConnected) { chart.destroy(); charts.delete(canvas); }
    for (const box of place.querySelectorAll(".plot")) if (!box.firstChild) seen.observe(box);
  }
  function draw(box) {
    const make = drawings.get(box);
    if (!make || box.firstChild) return;
    const canvas = el("canvas", { role: "img", "aria-label": box.dataset.label });
    box.append(canvas);
    charts.set(canvas, make(canvas));
  }
  function redrawn() {
    for (const [canvas, chart] of [...charts]) { // a copy: drawing adds to it
      chart.destroy();
      charts.delete(canvas);
      const box = canvas.parentElement;
      if (box) { canvas.remove(); draw(box); }
    }
  }
  const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const series = (which) => colour(`series-${which % 6}`);
  const SHAPES = ["circle", "triangle", "rect", "rectRot", "star", "crossRot"];
  const isPhone = () => innerWidth < 640;

  function chart(canvas, type, data, options) {
    const { scales, tooltip, legend = true, onClick, plugins = [], indexAxis = "x", kept } = options;
    for (const scale of Object.values(scales)) {
      scale.grid = { color: colour("grid") };
      scale.border = { color: colour("line") };
      scale.ticks = { color: colour("soft"), ...scale.ticks };
      if (scale.title) scale.title = { display: true, color: colour("soft"), text: scale.title };
    }
    return new Chart(canvas, { type, data, plugins, options: {
      indexAxis, responsive: true, maintainAspectRatio: false, animation: false, onClick, scales,
      plugins: { legend: { display: legend, position: "bottom", labels: { color: colour("ink"), usePointStyle: true, boxHeight: 7, ...(kept ? { filter: kept } : {}) } }, tooltip: { callbacks: tooltip || {} } },
    } });
  }
  /* On a logarithmic axis: powers of ten, and 2 and 5 where there are few of them. */
  function powers(value, _, ticks) {
    const lead = value / 10 ** Math.floor(Math.log10(value) + 1e-9);
    const span = Math.log10(ticks.at(-1).value / ticks[0].value);
    const keep = span < 0.5 ? [1, 1.1, 1.2, 1.5, 2, 3, 4, 5, 6, 7, 8, 9] : span < 1.5 ? [1, 2, 3, 5, 7] : span < 3 ? [1, 2, 5] : [1];
    if (!keep.some((one) => Math.abs(one - lead) < 1e-6)) return null;
    if (span > 9 && Math.round(Math.log10(value)) % 2) return null;
    const size = Math.round(Math.log10(value / lead));
    return size >= -3 && size <= 4 ? figure(value, 2) : `${Math.round(lead)}e${size < 0 ? "-" : "+"}${String(Math.abs(size)).padStart(2, "0")}`;
  }
  /* Margins of a logarithmic axis: no mark lies on its edge. */
  function around(values, factor) {
    const found = values.map(real).filter((value) => value > 0 && Number.isFinite(value));
    return found.length ? { min: Math.min(...found) / factor, max: Math.max(...found) * factor } : {};
  }
  /* Vertical or horizontal lines at values: 1, where a technique is as fast as eager. */
  const lines = (axis, value) => ({ id: "lines", beforeDatasetsDraw(drawing) {
    const scale = drawing.scales[axis];
    if (value < scale.min || value > scale.max) return;
    const at = scale.getPixelForValue(value);
    const { ctx, chartArea: area } = drawing;
    ctx.save();
    ctx.strokeStyle = colour("soft");
    ctx.setLineDash([5, 4]);
    ctx.beginPath();
    if (axis === "x") { ctx.moveTo(at, area.top); ctx.lineTo(at, area.bottom); } else { ctx.moveTo(area.left, at); ctx.lineTo(area.right, at); }
    ctx.stroke();
    ctx.restore();
  } });
  const short = (word, most = isPhone() ? 18 : 44) => (word.length > most ? `${word.slice(0, most - 1)}…` : word);

  /* The name of each technique beside its mark, where it covers no other mark or name. */
  const names = { id: "names", afterDatasetsDraw(drawing) {
    const { ctx, chartArea: area } = drawing;
    const marks = drawing.data.datasets.flatMap((set, which) => (drawing.isDatasetVisible(which)
      ? drawing.getDatasetMeta(which).data.map(({ x, y }, at) => ({ x, y, word: short(set.data[at].one.technique) })) : []));
    const taken = marks.map(({ x, y }) => [x - 7, y - 7, x + 7, y + 7]);
    ctx.save();
    ctx.font = "12px sans-serif";
    ctx.fillStyle = colour("ink");
    ctx.textBaseline = "middle";
    for (const { x, y, word } of marks.sort((one, other) => other.x - one.x)) { // the fastest first
      const wide = ctx.measureText(word).width;
      for (const [left, middle] of [[x + 10, y], [x - 10 - wide, y], ...[-15, 15, -29].map((off) => [Math.min(x - wide / 2, area.right - wide), y + off])]) {
        const box = [left, middle - 7, left + wide, middle + 7];
        if (box[0] < area.left || box[2] > area.right || box[1] < area.top || box[3] > area.bottom) continue;
        if (taken.some((other) => box[0] < other[2] && box[2] > other[0] && box[1] < other[3] && box[3] > other[1])) continue;
        ctx.fillText(word, left, middle);
        taken.push(box);
        break;
      }
    }
    ctx.restore();
  } };

  function tradeoffsPlot(canvas) {
    const groups = grouped(index.tradeoffs.filter((one) => one.error > 0));
    const datasets = [...groups].map(([label, found], which) => ({
      label, data: found.map((one) => ({ x: one.median, y: one.error, one })), pointStyle: SHAPES[which % 6], pointRadius: 5, pointHoverRadius: 7,
      backgroundColor: `${series(which)}99`, borderColor: series(which), borderWidth: 1.5,
    }));
    return chart(canvas, "scatter", { datasets }, {
      plugins: [lines("x", 1), ...(index.tradeoffs.length <= MOST_NAMES ? [names] : [])],
      scales: { x: { type: "logarithmic", ...around([1, ...index.tradeoffs.map((one) => one.median)], 1.2), title: "speed-up over FP32 eager (right: faster)", ticks: { callback: powers } }, y: { type: "logarithmic", ...around(index.tradeoffs.map((one) => one.error), 3), title: isPhone() ? "error of a row" : "largest relative error of a row", ticks: { callback: powers } } },
      tooltip: { label: ({ raw: { one } }) => [`${one.technique}, ${one.device}, ${one.mode}`, `${figure(one.median)}x (${figure(one.low)}x to ${figure(one.high)}x), ${count(one.cases, "case")}`, `error ${figure(one.error)}`] },
      onClick: (_, hit) => { if (hit.length) { const { one } = datasets[hit[0].datasetIndex].data[hit[0].index]; location.hash = new URLSearchParams({ cases: "", technique: one.technique, mode: one.mode }); } },
    });
  }
  function grouped(found) {
    const groups = new Map();
    for (const one of found) {
      const key = `${one.device}, ${{ speed: "inference", "train-speed": "training" }[one.mode] || one.mode}`;
      groups.set(key, [...(groups.get(key) || []), one]);
    }
    return groups;
  }
  function memoryPlot(canvas) {
    const names = [...new Set(index.memory.map((one) => one.technique))];
    const groups = grouped(index.memory);
    const datasets = [...groups].flatMap(([label, found], which) => {
      const of = (technique) => found.find((one) => one.technique === technique);
      return [{
        label, data: names.map((name) => { const one = of(name); return one ? [100 * one.low, 100 * Math.max(one.high, one.low * 1.004)] : null; }),
        backgroundColor: `${series(which)}66`, borderColor: series(which), borderWidth: 1, borderSkipped: false, minBarLength: 3, found: names.map(of), grouped: true,
      }];
    });
    const medians = { id: "medians", afterDatasetsDraw(drawing) {
      const { ctx } = drawing;
      ctx.save();
      ctx.fillStyle = colour("ink");
      drawing.data.datasets.forEach((set, which) => {
        if (!drawing.isDatasetVisible(which)) return;
        drawing.getDatasetMeta(which).data.forEach((bar, at) => {
          const one = set.found[at];
          if (one) ctx.fillRect(drawing.scales.x.getPixelForValue(100 * one.median) - 1.5, bar.y - bar.height / 2, 3, bar.height);
        });
      });
      ctx.restore();
    } };
    return chart(canvas, "bar", { labels: names.map((name) => short(name)), datasets }, {
      indexAxis: "y", plugins: [lines("x", 100), medians],
      scales: { x: { type: "logarithmic", ...around([100, ...index.memory.flatMap((one) => [100 * one.low, 100 * one.high])], 1.15), title: "% of eager's peak memory", ticks: { callback: powers } }, y: { ticks: { autoSkip: false } } },
      tooltip: { label: ({ dataset, dataIndex }) => { const one = dataset.found[dataIndex]; return one ? `${one.device}, ${one.mode}: ${figure(100 * one.median)} % (${figure(100 * one.low)} to ${figure(100 * one.high)} %), ${count(one.cases, "case")}` : ""; } },
    });
  }
  function curvePlot(canvas, number) {
    const groups = new Map();
    for (const point of index.curves[number].points) groups.set(point.series, [...(groups.get(point.series) || []), point]);
    const datasets = [...groups].flatMap(([label, points], which) => [
      { label, data: points.map((point) => ({ x: point.count, y: point.ratio, point })), borderColor: series(which), backgroundColor: series(which), pointStyle: SHAPES[which % 4], pointRadius: 4, borderWidth: 1.5, borderDash: which % 2 ? [6, 3] : [] },
    ]);
    const whole = {
      scales: { x: { type: "linear", title: "element-wise statements" }, y: { type: "logarithmic", title: "time / eager's (below 1: faster)", ticks: { callback: powers } } },
      tooltip: { title: (items) => `${items[0].raw.x} statements`, label: ({ dataset, raw: { point } }) => `${dataset.label}: ${figure(point.ratio)} (${figure(point.low)} to ${figure(point.high)})` },
    };
    const intervals = { id: "intervals", beforeDatasetsDraw(drawing) {
      const { ctx, scales: { x, y } } = drawing;
      drawing.data.datasets.forEach((set, which) => {
        if (!drawing.isDatasetVisible(which)) return;
        ctx.save();
        ctx.strokeStyle = set.borderColor;
        ctx.lineWidth = 2;
        for (const { point } of set.data) {
          ctx.beginPath();
          ctx.moveTo(x.getPixelForValue(point.count), y.getPixelForValue(point.low));
          ctx.lineTo(x.getPixelForValue(point.count), y.getPixelForValue(point.high));
          ctx.stroke();
        }
        ctx.restore();
      });
    } };
    return chart(canvas, "line", { datasets }, { ...whole, plugins: [lines("y", 1), intervals] });
  }
  function viewsPlot(canvas, figures) {
    const several = new Set(figures.map((one) => one.path)).size > 1;
    const labels = figures.map((one) => short(several ? `${one.view}, ${one.path}` : one.view));
    const bad = (one) => !one.within;
    const datasets = [
      { type: "line", showLine: false, label: "measured", data: figures.map((one) => real(one.measured)), pointStyle: figures.map((one) => (bad(one) ? "crossRot" : "circle")), pointRadius: 6, borderWidth: 2,
        borderColor: figures.map((one) => (bad(one) ? colour("bad") : series(0))), backgroundColor: series(0) },
      { type: "line", showLine: false, label: "budget", data: figures.map((one) => real(one.allowed)), pointStyle: "line", rotation: 90, pointRadius: 10, borderWidth: 2.5, borderColor: colour("ink") },
      { type: "bar", label: "between", data: figures.map((one) => [Math.min(real(one.measured), real(one.allowed)), Math.max(real(one.measured), real(one.allowed))]), barThickness: 4,
        backgroundColor: figures.map((one) => `${bad(one) ? colour("bad") : series(0)}44`), borderSkipped: false },
    ];
    return sideways(canvas, labels, datasets, { title: "error (logarithmic)", ...around(figures.flatMap((one) => [one.measured, one.allowed]), 2), ticks: { callback: powers } }, ({ dataset, dataIndex }) =>
      (dataset.label === "between" ? null : `${dataset.label} ${figure(dataset.label === "measured" ? figures[dataIndex].measured : figures[dataIndex].allowed, 4)}`), "logarithmic", (item) => item.text !== "between");
  }
  function sideways(canvas, labels, datasets, x, label, type = "linear", kept = null, plugins = []) {
    return chart(canvas, "bar", { labels, datasets }, {
      scales: { x: { type, ...x }, y: { type: "category", offset: true, ticks: { autoSkip: false } } }, tooltip: { label }, legend: kept !== null, kept, plugins, indexAxis: "y",
    });
  }
  function ratiosPlot(canvas, ratios) {
    const data = [
      { type: "line", showLine: false, label: "value", data: ratios.map((one) => one.value), pointRadius: 5, backgroundColor: series(0), borderColor: series(0) },
      { type: "bar", label: "interval", data: ratios.map((one) => [one.low, one.high]), barThickness: 6, minBarLength: 2, backgroundColor: `${series(0)}66`, borderSkipped: false },
    ];
    return sideways(canvas, ratios.map((one) => short(one.name)), data, { title: "ratio (logarithmic)", ...around([1, ...ratios.flatMap((one) => [one.low, one.high, one.value])], 1.1), ticks: { callback: powers } }, ({ dataIndex }) => {
      const one = ratios[dataIndex];
      return `${figure(one.value, 4)}x (${figure(one.low, 4)}x to ${figure(one.high, 4)}x)`;
    }, "logarithmic", () => true, [lines("x", 1)]);
  }
  const timesPlot = (canvas, times) => chart(canvas, "line", { labels: times.map((_, which) => which + 1), datasets: [
    { label: "seconds a call", data: times.map(real), borderColor: series(0), backgroundColor: series(0), pointRadius: 3, borderWidth: 1 }] }, {
    legend: false, scales: { x: { title: "block" }, y: { beginAtZero: true, title: "time of a call", ticks: { callback: duration } } }, tooltip: { label: ({ raw }) => duration(raw) } });
  const phasesPlot = (canvas, seconds) => sideways(canvas, seconds.map(([phase]) => short(phase)), [
    { label: "seconds", data: seconds.map(([, spent]) => real(spent)), backgroundColor: series(0), barThickness: 12 }], { title: "seconds" }, ({ raw }) => duration(raw));

  /* The address holds the selection. */

  function route() {
    const asked = new URLSearchParams(location.hash.slice(1));
    if (asked.has("case")) return open(asked.get("case"), asked.get("run"));
    byId("page").hidden = true;
    byId("overview").hidden = false;
    document.title = title;
    drawn(byId("overview"));
    if (asked.has("cases")) {
      for (const name of Object.keys(filter)) filter[name] = asked.get(name) || "";
      if (asked.size > 1 || location.hash !== "#cases") { page = 0; shown(); }
    }
    const place = byId(asked.has("cases") ? "cases" : location.hash.slice(1));
    if (place) { place.scrollIntoView({ behavior: "instant" }); place.focus({ preventScroll: true }); }
    return undefined;
  }

  const title = document.title;
  const failed = (error) => {
    root.classList.remove("live");
    byId("overview").prepend(el("p", { class: "note" }, `Filters and case pages do not work in this browser: ${error.message}. They need DecompressionStream (Chromium 80, Firefox 113, Safari 16.4).`));
    throw error;
  };
  async function begin() {
    index = await unpacked("index");
    ({ texts, columns } = index);
    size = columns.run.length;
    const low = texts.map((text) => text.toLowerCase());
    words = columns.run.map((_, at) => `${idOf(at).toLowerCase()} ${low[columns.note[at]]} ${low[columns.family[at]]}`);
    for (const code of document.querySelectorAll(".command > code")) code.parentElement.replaceWith(copyable(code));
    controls();
    shown();
    for (const box of document.querySelectorAll(".plot[data-plot]")) {
      const make = { tradeoffs: tradeoffsPlot, memory: memoryPlot, curve: (canvas) => curvePlot(canvas, Number(box.dataset.number)) }[box.dataset.plot];
      if (box.dataset.plot === "memory") box.style.height = `${Math.max(220, index.memory.length * 13 + new Set(index.memory.map((one) => one.technique)).size * 9 + 90)}px`;
      drawings.set(box, make);
    }
    addEventListener("hashchange", () => { route(); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawn);
    addEventListener("beforeprint", () => { for (const box of document.querySelectorAll("main:not([hidden]) .plot")) draw(box); });
    await route();
    if (!location.hash) drawn(byId("overview"));
    root.dataset.ready = "yes";
  }
  root.classList.add("live");
  // What Python made is painted first.
  requestAnimationFrame(() => setTimeout(() => begin().catch(failed), 0));
})();
