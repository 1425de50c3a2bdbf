"""The formats of models that write calls as marked-up text (markup.py)."""

import re

from .markup import MarkupFormat


class FunctionFormat(MarkupFormat):
    """The format of Qwen3-Coder and Qwen3.5: <function=NAME>, <parameter=KEY>, the value, </parameter>, </function>."""

    name = "functions"
    MARKS = BEGIN, END = "<tool_call>", "</tool_call>"
    FUNCTION, END_NAME, END_FUNCTION = "<function=", ">", "</function>"
    KEY, END_KEY, END_VALUE, BREAK = "<parameter=", ">", "</parameter>", "\n"
    VALUE_MARKS = re.compile(r"<parameter=[^>\n]*>|</parameter>")
    BEFORE_VALUE, AFTER_VALUE = "<parameter=%s>\n", "\n</parameter>\n"
    OPENINGS = (BEGIN, FUNCTION)
    BEGIN_CALL, END_CALL = BEGIN + "\n" + FUNCTION + "%(name)s>\n", END_FUNCTION + "\n" + END
    BETWEEN = "\n"

    def is_shown_by(self, template: str) -> bool:
        return self.FUNCTION in template and self.KEY in template


class GlmFormat(MarkupFormat):
    """The format of GLM-4.5 and 4.6: <tool_call>NAME, and lines <arg_key>KEY</arg_key>, <arg_value>...</arg_value>."""

    name = "glm"
    BEGIN, END = "<tool_call>", "</tool_call>"
    FUNCTION, END_NAME, END_FUNCTION = BEGIN, "", END
    KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
    MARKS = (BEGIN, END, KEY, END_KEY, VALUE, END_VALUE)
    VALUE_MARKS = re.compile(f"{VALUE}|{END_VALUE}")
    BEFORE_VALUE, AFTER_VALUE = f"{KEY}%s{END_KEY}\n{VALUE}", f"{END_VALUE}\n"
    OPENINGS = (BEGIN,)
    BEGIN_CALL, END_CALL, BETWEEN = f"{BEGIN}%(name)s\n", END, "\n"

    def is_shown_by(self, template: str) -> bool:
        return self.KEY in template


class GlmDenseFormat(GlmFormat):
    """The format of GLM-4.7: that of GLM-4.5 without line breaks."""

    name = "glm-dense"
    BEFORE_VALUE = f"{GlmFormat.KEY}%s{GlmFormat.END_KEY}{GlmFormat.VALUE}"
    AFTER_VALUE = GlmFormat.END_VALUE
    BEGIN_CALL, BETWEEN = f"{GlmFormat.BEGIN}%(name)s", ""

    def is_shown_by(self, template: str) -> bool:
        return f"{self.END_KEY}{self.VALUE}" in template


class MinimaxFormat(MarkupFormat):
    """The format of MiniMax-M2: <invoke name="NAME">, <parameter name="KEY">, the value, </parameter> and </invoke>.

    Marks stand around all calls.
    """

    name = "minimax"
    MARKS = BEGIN, END = "<minimax:tool_call>", "</minimax:tool_call>"
    FUNCTION, END_NAME, END_FUNCTION = '<invoke name="', '">', "</invoke>"
    KEY, END_KEY, END_VALUE = '<parameter name="', '">', "</parameter>"
    VALUE_MARKS = re.compile(r'<parameter name="[^"\n]*">|</parameter>')
    BEFORE_VALUE, AFTER_VALUE = '<parameter name="%s">', "</parameter>\n"
    OPENINGS = (BEGIN, FUNCTION)
    BEGIN_CALLS, END_CALLS = f"{BEGIN}\n", END
    BEGIN_CALL, END_CALL = '<invoke name="%(name)s">\n', f"{END_FUNCTION}\n"

    def is_shown_by(self, template: str) -> bool:
        return self.BEGIN in template
