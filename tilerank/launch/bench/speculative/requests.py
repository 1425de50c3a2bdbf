"""Four kinds of requests, from answers that repeat nearly all of their prompt to answers that repeat nothing."""

from collections.abc import Callable, Mapping

from tilerank.loader.tokenizer import Tokenizer

VARIANTS = 16
"""Different requests of each kind, which run together in a batch."""

_TOWNS = (
    *("Aldbrook", "Brinmouth", "Carrowby", "Dunfleet", "Eastmere", "Farholm", "Greywick", "Hollin"),
    *("Ivybridge", "Kelmarsh", "Lowfield", "Marston", "Northam", "Oldbury", "Penrose", "Quarley"),
)

_CODE = '''
class Ledger:
    """The bookings of {town}, in order of their dates."""

    def __init__(self, currency: str) -> None:
        self.currency = currency
        self.entries: list[Entry] = []

    def book(self, date: str, account: str, amount: int, note: str = "") -> Entry:
        """Add a booking and return it. Raises ValueError for an amount of zero."""
        if amount == 0:
            raise ValueError(f"account {{account}}: expected an amount other than 0")
        entry = Entry(date, account, amount, note)
        self.entries.append(entry)
        self.entries.sort(key=lambda entry: entry.date)
        return entry

    def balance(self, account: str) -> int:
        """Return the sum of all bookings of an account."""
        return sum(entry.amount for entry in self.entries if entry.account == account)

    def statement(self, account: str) -> str:
        """Return the bookings of an account as text, one on each line, and the balance after them."""
        own = [entry for entry in self.entries if entry.account == account]
        lines = [f"{{entry.date}}  {{entry.amount:>10}}  {{entry.note}}" for entry in own]
        lines.append(f"balance of {{account}}: {{self.balance(account)}} {{self.currency}}")
        return "\\n".join(lines)
'''

_PASSAGE = """
The canal of {town} was dug between 1791 and 1797 to bring coal from the pits in the hills to the kilns by the river. \
It has eleven locks, of which the lowest two are built as a staircase, because the ground falls away too steeply for a \
pool between them. The engineer had planned a tunnel under the ridge, but the clay was so wet that the work was given \
up after eighty yards, and the canal goes around the ridge in a long curve that boatmen called the Bow.

For sixty years the canal paid its owners well. In its best year 190,000 tons of coal and 40,000 tons of lime went \
through the lowest lock. Then the railway came. The company lowered its tolls three times and let the towpath to a \
farmer, but by 1880 there were weeks in which no boat passed at all. The last cargo, a load of bricks for the new \
school, was carried in October 1911.

In the spring of 1968 a group of volunteers began to clear the locks. They found the gates rotten and the chambers \
full of rubble, among it two carts and a church bell. It took them twenty-three years. Today the canal is open to \
small boats from April to October, the Bow is a nature reserve, and the bell hangs in the old toll house.
"""

_RECORDS = """
Order 4417 of 3 March: Mrs. Adeyemi of {town} bought two oak shelves at 89.50 each, to be delivered on Friday.
Order 4418 of 3 March: Mr. Lindqvist of {town} bought one walnut desk at 640.00, to be collected.
Order 4419 of 4 March: Ms. Okafor of {town} bought six ash chairs at 112.25 each, to be delivered on Monday.
Order 4420 of 5 March: Mr. Beaumont of {town} bought one pine bench at 75.00, to be collected.
"""

_FORM = """{"orders": [{"number": 0, "date": "", "customer": "", "town": "", "item": "", "count": 0, "price": 0.0, \
"delivery": ""}]}"""


def _edit(town: str) -> str:
    code = _CODE.format(town=town)
    return f"Rename the method `book` to `add_booking` in this code. Return the whole code.\n```python{code}```"


def _quote(town: str) -> str:
    passage = _PASSAGE.format(town=town)
    return f"Here is a text.\n{passage}\nQuote its first two paragraphs word by word, then summarise the third one."


def _fill(town: str) -> str:
    return f"Write these orders as JSON of this form: {_FORM}\n{_RECORDS.format(town=town)}"


def _free(town: str) -> str:
    return f"Tell a story about a clockmaker in {town} who finds a letter that was written to somebody else."


TASKS: Mapping[str, Callable[[str], str]] = {"edit": _edit, "quote": _quote, "json": _fill, "free": _free}
"""edit: given code. quote: a given text, and a summary. json: given records in a given form. free: a story."""


def requests(task: str, count: int) -> list[str]:
    """Return `count` different requests, at most VARIANTS."""
    return [TASKS[task](town) for town in _TOWNS[:count]]


def prompts(tokenizer: Tokenizer, task: str, count: int) -> list[list[int]]:
    """Return the tokens of `count` requests as the model's chat template writes them."""
    chats = [[{"role": "user", "content": text}] for text in requests(task, count)]
    rendered = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
    return [tokenizer.encode(text, add_special_tokens=False) for text in rendered]


def end_token_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end an answer."""
    return tokenizer.end_token_ids(tokenizer.chat_template.after_answer)
