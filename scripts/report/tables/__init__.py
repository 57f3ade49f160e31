"""The sections of results/README.md, README.md and the model card, as Markdown, from results/*.json and the code."""
