// Shows the OpenAPI document of this server. Nothing is asked of any other host: there is no
// validator, and keys stay in the memory of this page.
"use strict";

const dark = window.matchMedia("(prefers-color-scheme: dark)");
const follow = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", follow);
follow();

const place = document.getElementById("api");
SwaggerUIBundle({
  domNode: place,
  url: place.dataset.document,
  presets: [SwaggerUIBundle.presets.apis],
  layout: "BaseLayout",
  deepLinking: true,
  docExpansion: "list",
  filter: true,
  validatorUrl: null,
  persistAuthorization: false,
  tryItOutEnabled: false,
});
