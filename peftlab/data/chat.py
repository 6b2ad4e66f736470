"""Chat messages and the ChatML format, recognised from a tokenizer's own template."""

from collections.abc import Iterable, Iterator, Mapping
import dataclasses
import re

from peftlab._registry import did_you_mean

Message = Mapping[str, str]  # {'role': ..., 'content': ...}
ROLES = ('system', 'user', 'assistant')

# The two templates that are plain ChatML: with and without a default system message.
_LOOP = r'\{% for message in messages %\}'
_DEFAULT = (
  r"\{% if loop\.first and messages\[0\]\['role'\] != 'system' %\}"
  r"\{\{ ?'<\|im_start\|>system\n(?P<system>[^']*)<\|im_end\|>\n' ?\}\}\{% endif %\}"
)
_TURN = (
  r"\{\{ ?'<\|im_start\|>' \+ message\['role'\] \+ '\n' \+ message\['content'\] \+ "
  r"'<\|im_end\|>' \+ '\n' ?\}\}\{% endfor %\}"
)
_GENERATE = r"\{% if add_generation_prompt %\}\{\{ ?'<\|im_start\|>assistant\n' ?\}\}\{% endif %\}"
_CHATML = re.compile(f'{_LOOP}({_DEFAULT})?{_TURN}{_GENERATE}')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
  """A part of a rendered chat: `special` names a control token, or `text` is encoded as text."""

  special: str = ''
  text: str = ''
  completion: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatMl:
  r"""ChatML: `<|im_start|>role\ncontent<|im_end|>\n` for each message.

  Attributes:
    default_system: the system message of a chat that has none; '' for none at all.
  """

  default_system: str = ''

  def pieces(self, messages: Iterable[Message], *, generate: bool = False) -> Iterator[Piece]:
    """The chat in pieces; what an assistant says, with its <|im_end|>, is completion.

    Args:
      messages: checked, see `check_messages`.
      generate: ends with the opening of an assistant's message.
    """
    messages = list(messages)
    if self.default_system and messages[0]['role'] != 'system':
      messages.insert(0, {'role': 'system', 'content': self.default_system})
    for message in messages:
      completion = message['role'] == 'assistant'
      yield Piece(special='<|im_start|>')
      yield Piece(text=message['role'] + '\n')
      yield Piece(text=message['content'], completion=completion)
      yield Piece(special='<|im_end|>', completion=completion)
      yield Piece(text='\n')
    if generate:
      yield Piece(special='<|im_start|>')
      yield Piece(text='assistant\n')


def recognise(template: str | None) -> ChatMl | None:
  """The chat format that a Jinja template spells out, None where it is not plain ChatML."""
  match = _CHATML.fullmatch((template or '').replace('\\n', '\n').strip())
  return match and ChatMl(default_system=match['system'] or '')


def check_messages(messages: object, *, subject: str) -> list[Message]:
  """`messages`, where they are a chat; otherwise ValueError that starts with `subject`."""
  if not isinstance(messages, list | tuple) or not messages:
    raise ValueError(f'{subject} has messages {messages!r:.60}; expected a list of one or more.')
  for number, message in enumerate(messages):
    if not isinstance(message, Mapping) or set(message) != {'role', 'content'}:
      raise ValueError(
        f'{subject} has message {number} {message!r:.80}; expected the keys role and content.'
      )
    role, content = message['role'], message['content']
    if role not in ROLES:
      near = did_you_mean(str(role), ROLES)
      raise ValueError(
        f'{subject} has message {number} of role {role!r}{near or "."} Expected one of: '
        f'{", ".join(ROLES)}.'
      )
    if role == 'system' and number:
      raise ValueError(f'{subject} has a system message at place {number}; expected it first.')
    if not isinstance(content, str):
      raise ValueError(f'{subject} has message {number} with content {content!r:.60}, not text.')
  return list(messages)
