"use strict";
// Arranges the content of the page. Strings are inserted as text, never as markup; Plotly's arrive escaped.
(() => {
  const $ = (id) => document.getElementById(id);
  const make = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name in node) node[name] = value;
      else node.setAttribute(name, value);
    }
    node.append(...children);
    return node;
  };
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const BLACK = "#000000"; // what a curve in the colour of the text has in the data
  const layout = () => ({
    hovermode: "closest",
    font: { family: "system-ui, sans-serif", size: 12, color: color("--text") },
    legend: { font: { size: 11 }, itemclick: "toggle" },
    colorway: [],
    plot_bgcolor: color("--back"),
    paper_bgcolor: color("--back"),
    bargap: 0,
  });
  const axis = () => ({ gridcolor: color("--line"), linecolor: color("--soft"), showline: true, ticks: "outside", automargin: true });
  const CONFIG = { responsive: true, displaylogo: false, displayModeBar: "hover", modeBarButtonsToRemove: ["lasso2d", "select2d"] };

  let content = JSON.parse($("content").textContent);
  const cards = new Map(); // by id of the picture: { node, plot, select, picture, seen }
  const hidden = new Set(); // names of members that are switched off
  const drawn = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const card = cards.get(entry.target.id);
      if (!card) continue;
      card.seen = entry.isIntersecting;
      if (card.seen && card.stale) draw(card);
    }
  }, { rootMargin: "600px" });

  const decode = (name) => new DOMParser().parseFromString(name, "text/html").documentElement.textContent;

  function shown(member) {
    return !member || !(hidden.has(member) || !matches(member));
  }

  function matches(member) {
    const wanted = $("filter").value.trim().toLowerCase();
    const name = decode(member).toLowerCase();
    if (!wanted.includes("*")) return name.includes(wanted);
    const pattern = wanted.split("*").map((part) => part.replace(/[.+?^${}()|[\]\\]/g, "\\$&")).join(".*");
    return new RegExp(`^${pattern}$`).test(name);
  }

  function draw(card) {
    card.stale = false;
    const page = card.picture.pages[Number(card.select.value) || 0];
    const text = color("--text");
    const data = page.data.map((trace) => {
      const member = trace.meta && trace.meta.member;
      const line = trace.line && trace.line.color === BLACK ? { line: { ...trace.line, color: text } } : {};
      const faint = card.focus.size && member && !card.focus.has(member) ? { opacity: 0.15 } : {};
      return { ...trace, ...line, ...faint, ...(shown(member) ? {} : { visible: false }) };
    });
    const kept = structuredClone(page.layout);
    for (const shape of kept.shapes) if (shape.line.color === BLACK) shape.line.color = text;
    for (const words of kept.annotations) words.font = { color: color("--soft"), ...words.font };
    card.title.textContent = page.title;
    card.note.textContent = page.note;
    card.all.hidden = !card.focus.size;
    // The revision keeps zoom and legend when new rows arrive.
    Plotly.react(card.plot, data, { ...layout(), uirevision: page.name || "kept", ...kept,
      xaxis: { ...axis(), ...kept.xaxis }, yaxis: { ...axis(), ...kept.yaxis } }, CONFIG);
  }

  // Shows what a finding is about: its plot, and its layers before the others.
  function look(found) {
    const one = cards.get(found.picture);
    if (!one) return;
    const at = one.picture.pages.findIndex((page) => page.name === found.page);
    if (at >= 0) one.select.value = String(at);
    const there = new Set(one.picture.pages[Number(one.select.value) || 0].data.map((trace) => trace.meta && trace.meta.member));
    one.focus = new Set(found.members.filter((member) => there.has(member)));
    refresh(one);
  }

  function refresh(card) {
    card.stale = true;
    if (card.seen) draw(card);
  }

  function card(picture) {
    let one = cards.get(picture.id);
    if (!one) {
      const title = make("h3");
      const select = make("select", { title: "which one" });
      select.setAttribute("aria-label", "which one");
      const plot = make("div", { className: "plot" });
      const note = make("p", { className: "note" });
      const all = make("button", { type: "button", className: "focus", hidden: true }, "show all layers");
      const node = make("article", { className: "picture", id: picture.id }, make("header", {}, title, all, select), plot, note,
        make("p", { className: "help" }, picture.help + (picture.left_out ? ` (${picture.left_out} more are not shown)` : "")));
      one = { node, plot, select, title, note, all, focus: new Set(), seen: false };
      cards.set(picture.id, one);
      select.addEventListener("change", () => refresh(one));
      all.addEventListener("click", () => { one.focus = new Set(); refresh(one); });
      drawn.observe(node);
    }
    one.picture = picture;
    const chosen = one.select.selectedOptions.length ? one.select.selectedOptions[0].textContent : null;
    one.select.replaceChildren(...picture.pages.map((page, k) => make("option", { value: String(k), selected: page.name === chosen }, page.name)));
    one.select.hidden = picture.pages.length < 2;
    one.title.textContent = picture.pages[Number(one.select.value) || 0].title;
    refresh(one);
    return one.node;
  }

  function findings() {
    const items = content.findings.map((found) => {
      const source = found.url ? make("a", { href: found.url, rel: "noreferrer" }, found.source) : found.source;
      const place = found.picture ? make("a", { href: `#${found.picture}` }, "see the figure") : "";
      if (place) place.addEventListener("click", () => look(found));
      const kind = found.severity === "wrong" ? "wrong" : "worth a look";
      const of = content.runs.length > 1 ? `${found.run}: ` : "";
      return make("li", { className: found.severity }, make("span", { className: "kind" }, kind), make("h3", {}, of + found.title),
        make("p", {}, found.words), make("p", {}, place, place ? " · " : "", make("small", {}, "Rule: ", source)));
    });
    const unchecked = Object.entries(content.unchecked);
    const none = items.length ? "" : make("p", {}, content.sections.length ? "Nothing looks wrong by the rules that could be applied." : "No rows yet.");
    const rest = unchecked.length ? make("p", {}, make("small", {}, "Not checked, because the run has no such quantity: "
      + unchecked.map(([rule, needs]) => `${rule} (${needs})`).join("; ") + ".")) : "";
    $("findings").replaceChildren(make("h2", {}, items.length ? "What looks wrong" : "Findings"), none, make("ol", {}, ...items), rest);
  }

  function facts() {
    $("title").textContent = content.title;
    $("runs").replaceChildren(...content.runs.map((run) => {
      const words = Object.entries(run.facts).flatMap(([name, value], k) => [k ? " · " : "", `${name} `, make("b", {}, value)]);
      return make("p", { className: "facts" }, content.runs.length > 1 ? `${run.name}: ` : "", ...words);
    }));
  }

  function members() {
    const names = new Set();
    for (const section of content.sections)
      for (const picture of section.pictures)
        for (const page of picture.pages) for (const trace of page.data) if (trace.meta && trace.meta.member) names.add(trace.meta.member);
    $("picker").hidden = names.size === 0;
    $("members").replaceChildren(...[...names].map((name) => {
      const box = make("input", { type: "checkbox", checked: !hidden.has(name) });
      box.addEventListener("change", () => { if (box.checked) hidden.delete(name); else hidden.add(name); picked(); });
      const label = make("label", {}, box, ` ${decode(name)}`);
      label.hidden = !matches(name);
      label.dataset.member = name;
      return label;
    }));
    count();
  }

  function count() {
    const labels = [...$("members").children];
    const on = labels.filter((label) => shown(label.dataset.member)).length;
    $("picked").textContent = on === labels.length ? "(all)" : `(${on} of ${labels.length})`;
  }

  function picked() {
    for (const label of $("members").children) label.hidden = !matches(label.dataset.member);
    count();
    for (const one of cards.values()) refresh(one);
  }

  function arrange() {
    facts();
    findings();
    const there = new Set(content.sections.flatMap((section) => section.pictures.map((picture) => picture.id)));
    for (const [id, one] of cards) if (!there.has(id)) { Plotly.purge(one.plot); drawn.unobserve(one.node); one.node.remove(); cards.delete(id); }
    $("links").replaceChildren(...content.sections.map((s) => make("a", { href: `#section-${s.name.replace(/ /g, "-")}` }, s.name)));
    const wanted = new Set(content.sections.map((s) => `section-${s.name.replace(/ /g, "-")}`));
    for (const node of [...$("sections").children]) if (!wanted.has(node.id)) node.remove();
    for (const section of content.sections) {
      const id = `section-${section.name.replace(/ /g, "-")}`;
      let node = $(id);
      if (!node) {
        node = make("section", { id }, make("h2", {}, section.name), make("div", { className: "pictures" }));
      }
      $("sections").append(node); // in order
      const grid = node.querySelector(".pictures");
      const nodes = section.pictures.map(card);
      if (nodes.length !== grid.children.length || nodes.some((each, k) => grid.children[k] !== each)) grid.replaceChildren(...nodes);
    }
    members();
  }

  async function follow() {
    const live = $("live");
    live.hidden = false;
    live.textContent = "live: waiting for rows";
    let wait = content.refresh_seconds;
    for (;;) {
      await new Promise((done) => setTimeout(done, 1000 * wait));
      try {
        const answer = await fetch(`data?have=${encodeURIComponent(content.token)}`, { cache: "no-store" });
        if (answer.status === 200) {
          content = await answer.json();
          arrange();
          live.textContent = `live: rows of ${new Date().toLocaleTimeString()}`;
        } else if (answer.status !== 204) {
          throw new Error((await answer.text()) || `the server returned ${answer.status}`);
        }
        live.className = "";
        if (answer.status === 204 && live.dataset.lost) live.textContent = "live: waiting for rows";
        delete live.dataset.lost;
      } catch (error) {
        live.className = "lost";
        live.dataset.lost = "yes";
        live.textContent = error instanceof TypeError ? "`distcockpit watch` has ended; this is what it showed last." : String(error.message);
      }
    }
  }

  $("filter").addEventListener("input", picked);
  $("all").addEventListener("click", () => { $("filter").value = ""; hidden.clear(); members(); picked(); });
  $("none").addEventListener("click", () => { for (const label of $("members").children) hidden.add(label.dataset.member); members(); picked(); });
  dark.addEventListener("change", () => { for (const one of cards.values()) refresh(one); });
  arrange();
  if (content.refresh_seconds) follow();
  document.documentElement.dataset.ready = "yes";
})();
