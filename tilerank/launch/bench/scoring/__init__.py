"""How well a model predicts a text: windows of the text, and sums over its tokens."""
