"""Chat templates: their interface, and the Jinja programs of model directories. harmony/ is another template."""
