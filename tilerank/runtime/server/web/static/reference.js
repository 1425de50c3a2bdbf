/* The reference of the API, whose operations can be tried out. */
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#reference",
  validatorUrl: null,       // otherwise the description is sent to another server
  defaultModelsExpandDepth: 0,
});
const dark = matchMedia("(prefers-color-scheme: dark)");
const dress = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", dress);
dress();
