/* The site's own script: theme, menus, drawer, search shortcut, copy buttons, current section. No dependencies. */
(() => {
  "use strict";
  const root = document.documentElement;
  const body = document.body;
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];

  // theme: follows the system until the reader chooses
  const system = matchMedia("(prefers-color-scheme: dark)");
  const stored = () => { try { return localStorage.getItem("theme"); } catch { return null; } };
  system.addEventListener("change", () => { if (!stored()) root.dataset.theme = system.matches ? "dark" : "light"; });
  all("[data-theme-switch]").forEach((button) => button.addEventListener("click", () => {
    const theme = root.dataset.theme === "dark" ? "light" : "dark";
    root.dataset.theme = theme;
    try { localStorage.setItem("theme", theme); } catch { /* storage refused: this page only */ }
  }));

  // menus close on Escape and on a click elsewhere
  const closeMenus = (except) => all("details[data-menu][open]").forEach((menu) => { if (menu !== except) menu.open = false; });
  document.addEventListener("click", (event) => closeMenus(event.target.closest("a") ? null : event.target.closest("details[data-menu]")));

  // a change of language keeps the place: the section in view, else the one in the address
  const inView = (sections) => {
    const line = innerHeight * 0.25;
    let found = null;
    for (const section of sections) if (section.getBoundingClientRect().top < line) found = section;
    return found;
  };
  const keepPlace = (event) => {
    const link = event.target.closest("a[hreflang]");
    if (!link || link.pathname === location.pathname) return;
    const asked = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const top = asked ? asked.getBoundingClientRect().top : -1;
    const section = inView(all("main section[id] section[id]"));
    if (scrollY === 0) link.hash = "";
    else link.hash = section && !(top >= 0 && top < innerHeight) ? section.id : location.hash;
  };
  ["click", "auxclick", "contextmenu"].forEach((kind) => document.addEventListener(kind, keepPlace, true));

  // the list of pages begins where the reader is
  const open = document.querySelector(".contents [aria-current='page']");
  if (open) {
    const list = open.closest(".contents-inner");
    const { top, bottom } = open.getBoundingClientRect(), box = list.getBoundingClientRect();
    if (top < box.top || bottom > Math.min(box.bottom, innerHeight)) list.scrollTop += top - box.top - list.clientHeight / 2;
  }

  // the drawer with the chapters, on small screens
  const opener = document.querySelector("[data-drawer-open]");
  const drawer = document.getElementById("contents");
  const setDrawer = (open) => {
    body.classList.toggle("drawer-open", open);
    opener.setAttribute("aria-expanded", open);
    (open ? drawer.querySelector("[data-drawer-close]") : opener).focus();
  };
  if (opener && drawer) {
    opener.addEventListener("click", () => setDrawer(true));
    all("[data-drawer-close]").forEach((element) => element.addEventListener("click", () => setDrawer(false)));
    drawer.addEventListener("keydown", (event) => {
      if (event.key !== "Tab" || !body.classList.contains("drawer-open")) return;
      const stops = all("a, button", drawer).filter((element) => element.offsetParent);
      const edge = event.shiftKey ? stops[0] : stops[stops.length - 1];
      if (document.activeElement === edge) {
        event.preventDefault();
        (event.shiftKey ? stops[stops.length - 1] : stops[0]).focus();
      }
    });
  }

  // keys: "/" or Ctrl+K searches, Escape closes, arrows turn the page
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.target.closest("details[data-menu][open]")?.querySelector("summary").focus();
      closeMenus();
      if (body.classList.contains("drawer-open")) setDrawer(false);
    }
    const plain = !event.ctrlKey && !event.metaKey && !event.altKey && !event.shiftKey;
    const typing = event.target.closest("input, textarea, select, [contenteditable]");
    const slash = event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey;
    const turn = { ArrowLeft: "prev", ArrowRight: "next" }[event.key];
    // not where the arrows scroll: a wide table, an output
    if (turn && plain && !typing && !event.target.closest("[tabindex='0']")) {
      document.querySelector(`.turn a[rel=${turn}]`)?.click();
    }
    const controlK = event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey);
    if (slash || controlK) {
      const field = all("[data-search]").find((input) => input.offsetParent);
      if (field) { event.preventDefault(); field.focus(); field.select(); }
    }
  });

  // copy buttons
  if (navigator.clipboard) {
    const spoken = document.createElement("span");
    spoken.className = "sr-only";
    spoken.setAttribute("role", "status");
    body.append(spoken);
    all("div.highlight").forEach((block) => {
      const pre = block.querySelector("pre");
      if (!pre || block.closest(".cell_output")) return;
      const button = document.createElement("button");
      button.type = "button";
      button.className = "copy";
      button.title = root.dataset.copy || "Copy this code";
      button.setAttribute("aria-label", button.title);
      button.addEventListener("click", async () => {
        await navigator.clipboard.writeText(pre.textContent.replace(/\n$/, ""));
        button.classList.add("done");
        spoken.textContent = root.dataset.copied;
        setTimeout(() => { button.classList.remove("done"); spoken.textContent = ""; }, 1500);
      });
      block.append(button);
    });
  }

  // an address that names a fold, or something in one, unfolds it
  const unfold = () => {
    const found = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let fold = found; fold; fold = fold.parentElement.closest("details")) if (fold.tagName === "DETAILS") fold.open = true;
    found?.scrollIntoView();
  };
  addEventListener("hashchange", unfold);
  if (location.hash) unfold();

  // pages that were read to their end are ticked in the list of pages; only this browser knows them
  const pageOf = (path) => path.replace(/^.*\/book\//, "");
  const readPages = () => { try { return JSON.parse(localStorage.getItem("read")) || []; } catch { return []; } };
  const tick = () => all(".contents a").forEach((link) => {
    if (link.classList.contains("read") || !readPages().includes(pageOf(link.pathname))) return;
    const spoken = Object.assign(document.createElement("span"), { className: "sr-only", textContent: ` (${root.dataset.read})` });
    link.classList.add("read");
    link.append(spoken);
  });
  const end = document.querySelector(".turn");
  if (end) {
    new IntersectionObserver(([entry], observer) => {
      if (!entry.isIntersecting) return;
      observer.disconnect();
      try { localStorage.setItem("read", JSON.stringify([...new Set([...readPages(), pageOf(location.pathname)])])); } catch { /* storage refused */ }
      tick();
    }).observe(end);
  }
  tick();

  // a link into the glossary shows the entry: under the mouse, with the keyboard's focus, at the first touch
  const terms = all("main a[href*='glossary.html#']");
  if (terms.length) {
    const card = Object.assign(document.createElement("div"), { className: "term-card", id: "term-card", hidden: true });
    card.setAttribute("role", "tooltip");
    body.append(card);
    let glossary, shown = null, leaving;
    const hide = () => { shown?.removeAttribute("aria-describedby"); shown = null; card.hidden = true; };
    const show = async (link) => {
      clearTimeout(leaving);
      if (shown === link) return;
      hide();
      shown = link;
      glossary ??= fetch(link.href.split("#")[0]).then((answer) => answer.text()).then((html) => new DOMParser().parseFromString(html, "text/html"));
      const entry = (await glossary.catch(() => null))?.getElementById(decodeURIComponent(link.hash.slice(1)));
      const text = entry?.querySelector("p")?.cloneNode(true);
      if (!text || shown !== link) return;
      all("a", text).forEach((inner) => inner.replaceWith(...inner.childNodes)); // a card is read, not used
      const term = document.createElement("strong");
      term.textContent = entry.querySelector("h2").firstChild.textContent;
      card.replaceChildren(term, ...text.childNodes);
      card.hidden = false;
      link.setAttribute("aria-describedby", card.id);
      const place = link.getClientRects()[0], width = card.offsetWidth;
      const below = place.bottom + card.offsetHeight < innerHeight ? place.bottom + 6 : place.top - card.offsetHeight - 6;
      card.style.top = `${below + scrollY}px`;
      card.style.left = `${Math.max(16, Math.min(place.left, root.clientWidth - width - 16))}px`;
    };
    const leave = () => { leaving = setTimeout(hide, 250); };
    let touched = false;
    terms.forEach((link) => {
      link.addEventListener("pointerenter", (event) => { if (event.pointerType === "mouse") show(link); });
      link.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") leave(); });
      link.addEventListener("pointerdown", (event) => { touched = event.pointerType !== "mouse"; });
      link.addEventListener("focus", () => { if (link.matches(":focus-visible") && !touched) show(link); });
      link.addEventListener("blur", leave);
      link.addEventListener("click", (event) => { if (touched && shown !== link) { event.preventDefault(); show(link); } });
    });
    card.addEventListener("pointerenter", () => clearTimeout(leaving));
    card.addEventListener("pointerleave", leave);
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
    document.addEventListener("pointerdown", (event) => { if (!event.target.closest(".term-card, a[href*='glossary.html#']")) hide(); });
  }

  // boxes that scroll sideways can be reached by keyboard
  const reachable = () => all("pre, .cell_output > .output, .pst-scrollable-table-container, div.math").forEach((box) => {
    if (box.scrollWidth > box.clientWidth + 1) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  });
  addEventListener("load", reachable);
  addEventListener("resize", reachable);
  document.addEventListener("toggle", reachable, true); // what was folded has a width only now

  // mark the current section in the list at the right
  const spy = document.querySelector("[data-spy]");
  if (spy) {
    const links = new Map(all("a[href^='#']", spy).map((a) => [decodeURIComponent(a.hash.slice(1)), a]));
    const sections = all("main section[id]").filter((section) => links.has(section.id));
    let current = null;
    const mark = () => {
      const found = inView(sections);
      const link = found && links.get(found.id);
      if (link === current) return;
      current?.removeAttribute("aria-current");
      link?.setAttribute("aria-current", "true");
      current = link;
      if (link && spy.scrollHeight > spy.clientHeight) {
        const offset = link.offsetTop - spy.clientHeight / 2;
        spy.scrollTo({ top: offset });
      }
    };
    let waiting = false;
    addEventListener("scroll", () => {
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(() => { waiting = false; mark(); });
    }, { passive: true });
    mark();
  }
})();
