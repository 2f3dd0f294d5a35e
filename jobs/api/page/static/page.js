// What the pages do beside htmx: questions in a dialog, the live mark, the key for searching.
"use strict";
(() => {
  const dialog = document.getElementById("question");
  const mark = document.getElementById("live-state");

  function say(text, away) {
    if (!mark) return;
    mark.hidden = false;
    mark.classList.toggle("away", away);
    if (mark.textContent !== text) mark.textContent = text;
  }

  // A question that has come from the server is shown; Escape and "Leave it" close it.
  document.addEventListener("htmx:after:swap", () => {
    if (dialog && !dialog.open && dialog.querySelector("form.question")) dialog.showModal();
    showActions();
  });
  if (dialog) {
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog || event.target.closest("[data-close]")) {
        event.preventDefault();
        dialog.close();
      }
    });
    dialog.addEventListener("close", () => {
      document.getElementById("question-body").replaceChildren();
    });
  }

  // Which buttons fit the job's state; the live part of the page says it.
  function showActions() {
    const facts = document.querySelector("[data-actions]");
    if (!facts) return;
    const possible = facts.dataset.actions.split(" ");
    for (const button of document.querySelectorAll("#actions [data-action]")) {
      button.hidden = !possible.includes(button.dataset.action);
    }
  }

  // The space bar works on links that are buttons, as on every button.
  document.addEventListener("keydown", (event) => {
    const target = event.target;
    if (event.key === " " && target.matches("a[role=button]")) {
      event.preventDefault();
      target.click();
    }
    if (event.key === "/" && !target.matches("input, select, textarea") && !event.ctrlKey && !event.metaKey) {
      const search = document.querySelector("[data-shortcut='/']");
      if (search) {
        event.preventDefault();
        search.focus();
      }
    }
  });

  // The live parts: how they stand, and when the page has to be loaded again.
  document.addEventListener("htmx:sse:after:connection", () => say("Live", false));
  document.addEventListener("htmx:sse:error", (event) => {
    const status = event.detail.status;
    if (status === 401 || status === 404 || status === 410) location.reload();
    else say("Reconnecting", true);
  });
  document.addEventListener("htmx:sse:close", (event) => {
    if (event.detail.reason === "ended") say("Not live", true);
  });
  for (const name of ["signed-out", "gone"]) {
    document.addEventListener(name, () => location.reload());
  }
  // Without an event stream (too many are open) the page is asked for again now and then.
  document.addEventListener("htmx:after:request", (event) => {
    const source = event.detail.ctx && event.detail.ctx.sourceElement;
    if (!source || !source.hasAttribute || !source.hasAttribute("hx-sse:connect")) return;
    say("Not live", true);
    setTimeout(() => location.reload(), 30000);
  });

  // A job that ends while its page is open is over: the page stands still.
  document.addEventListener("htmx:sse:after:message", (event) => {
    const facts = event.target.querySelector && event.target.querySelector("[data-state]");
    const open = ["queued", "running", "paused", "cancelling"];
    if (facts && !open.includes(facts.dataset.state) && mark) mark.hidden = true;
  });

  // A link of another site hides the cookie from the server once. Then the browser is signed in.
  const form = document.querySelector("form[data-probe]");
  if (form && !form.querySelector("[role=alert]")) {
    fetch(form.dataset.probe, { redirect: "manual" }).then((answer) => {
      if (answer.status === 204) location.replace(form.dataset.next || "/ui/");
    }).catch(() => {});
  }
  showActions();
})();
