"""Read a model's tokenizer files with `tokenizers` alone: the backend, special tokens and chat templates.

The result equals that of transformers 5 (`PreTrainedTokenizerFast.from_pretrained` on a folder with a
`tokenizer.json`), which follows these rules:

- `tokenizer.json` holds the whole tokenizer. Its post-processor decides on BOS and EOS; `add_bos_token` and
  `add_eos_token` of `tokenizer_config.json` are ignored.
- `tokenizer_config.json` names the special tokens. If it has no `added_tokens_decoder`, it is in an older
  format, and `special_tokens_map.json` and `added_tokens.json` have the missing information.
- Special tokens that the backend lacks are added to it, with the next free ids.
- `chat_template.jinja` and `additional_chat_templates/*.jinja` replace the template in
  `tokenizer_config.json`.

Unlike transformers, decoding never cleans up spaces (see `models.tokenizer.ExactTokenizer`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from logprobe.errors import ModelNotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from tokenizers import AddedToken, Encoding, Tokenizer

    Token = str | AddedToken

TOKENIZER: Final = "tokenizer.json"
SETTINGS: Final = "tokenizer_config.json"
SPECIAL_TOKENS: Final = "special_tokens_map.json"
ADDED_TOKENS: Final = "added_tokens.json"
CHAT_TEMPLATE: Final = "chat_template.jinja"
MORE_TEMPLATES: Final = "additional_chat_templates"
# transformers' named special tokens, in its order.
NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Keys in tokenizer_config.json with which transformers' backend differs from tokenizer.json.
TRANSFORMERS_ONLY: Final = (
    "fast_tokenizer_files",
    "fix_mistral_regex",
    "post_processor",
    "tokenizer_object",
    "tokenizer_padding",
    "tokenizer_truncation",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFacts:
    """Properties of a tokenizer that its `tokenizers` backend does not store."""

    bos_token_id: int | None
    eos_token_id: int | None
    special_token_ids: frozenset[int]
    splits_special_tokens: bool  # if True, special tokens spelled out in a text are encoded like other text

    @classmethod
    def of(cls, tokenizer: Any) -> Self:
        """Read the properties from a transformers tokenizer."""
        return cls(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            special_token_ids=frozenset(tokenizer.all_special_ids),
            splits_special_tokens=tokenizer.split_special_tokens,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FastTokenizer:
    """A tokenizer whose attributes have the names and values of a transformers tokenizer."""

    backend: Tokenizer
    special_tokens_map: Mapping[str, str]  # name, such as `bos_token`, to text
    extra_special_tokens: tuple[str, ...]  # special tokens without a name
    chat_template: str | dict[str, str] | None  # a dict has several templates by name
    response_template: Any  # description of the model's replies, as JSON values
    split_special_tokens: bool  # True: special tokens spelled in a text are encoded like other text

    @property
    def facts(self) -> TokenizerFacts:
        """The tokenizer's special tokens by id, and how they are encoded."""
        return TokenizerFacts(
            bos_token_id=self.token_id("bos_token"),
            eos_token_id=self.token_id("eos_token"),
            special_token_ids=frozenset(self.all_special_ids),
            splits_special_tokens=self.split_special_tokens,
        )

    def token_id(self, name: str) -> int | None:
        """Return the id of the special token `name`, such as `bos_token`; None if there is none."""
        text = self.special_tokens_map.get(name)
        return None if text is None else self._id_of(text)

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of the special tokens, named ones first."""
        texts = dict.fromkeys((*self.special_tokens_map.values(), *self.extra_special_tokens))
        return [token_id for text in texts if (token_id := self._id_of(text)) is not None]

    def encode(self, text: str, *, add_special_tokens: bool = False) -> Encoding:
        """Encode a text to ids with their character offsets."""
        return self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Decode ids to text without changing spaces."""
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def _id_of(self, text: str) -> int | None:
        token_id = self.backend.token_to_id(text)
        if token_id is None and (unknown := self.special_tokens_map.get("unk_token")) is not None:
            return self.backend.token_to_id(unknown)
        return token_id


def read_fast_tokenizer(folder: Path) -> FastTokenizer | str:
    """Load the tokenizer in a model's folder.

    If its settings have a key that only transformers supports, return the name of this key instead.

    Raises:
        ModelNotFoundError: there is no `tokenizer.json`.
        Exception: a file is invalid (`tokenizers` raises a bare `Exception`).
    """
    from tokenizers import Tokenizer

    path = folder / TOKENIZER
    if not path.is_file():
        raise ModelNotFoundError(
            f"{folder}: has no tokenizer.json; convert the tokenizer with transformers "
            "(AutoTokenizer.from_pretrained, save_pretrained)"
        )
    settings = _read_json(folder / SETTINGS)
    if needed := [key for key in TRANSFORMERS_ONLY if settings.get(key)]:
        return needed[0]
    templates = _chat_templates(folder, settings.pop("chat_template", None))
    backend = Tokenizer.from_file(str(path))
    for name in ("add_bos_token", "add_eos_token"):  # the post-processor in tokenizer.json decides
        settings.pop(name, None)
    settings, added = _with_added_tokens(folder, _by_role(settings), backend)
    special, extra = _special_tokens(settings, backend)
    _add_missing(backend, added, [token for token in special.values() if token is not None], extra)
    texts = {name: str(token) for name, token in special.items() if token is not None}
    splits = bool(settings.get("split_special_tokens"))
    tokenizer = FastTokenizer(
        backend=backend,
        special_tokens_map=texts,
        extra_special_tokens=tuple(map(str, extra)),
        chat_template=templates,
        response_template=settings.get("response_template"),
        split_special_tokens=splits,
    )
    if "add_bos_token" in settings or "add_eos_token" in settings or backend.post_processor is None:
        _set_post_processor(tokenizer, settings)
    backend.encode_special_tokens = splits
    backend.no_truncation()
    backend.no_padding()
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; return an empty one if the file does not exist."""
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise TypeError(f"{path.name} must be a JSON object")
    return content


def _chat_templates(folder: Path, own: Any) -> str | dict[str, str] | None:
    """Return the chat templates in the folder's files, else `own`, the template in tokenizer_config.json."""
    files: dict[str, str] = {}
    if (folder / CHAT_TEMPLATE).is_file():
        files["default"] = (folder / CHAT_TEMPLATE).read_text(encoding="utf-8")
    for path in sorted((folder / MORE_TEMPLATES).glob("*.jinja")):
        files[path.name.removesuffix(".jinja")] = path.read_text(encoding="utf-8")
    if files:
        return files["default"] if files.keys() == {"default"} else files
    named = {entry["name"]: entry["template"] for entry in own} if isinstance(own, list) else own
    texts = named.values() if isinstance(named, dict) else [named]
    if not all(text is None or isinstance(text, str) for text in texts):
        raise TypeError(f"chat_template of {SETTINGS} must be text")
    return named


def _by_role(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings in transformers 5's form.

    Tokens with a name that only this model uses go to `model_specific_special_tokens`, and further special
    tokens go to `extra_special_tokens`.
    """
    settings = dict(settings)
    if "additional_special_tokens" in settings and not settings.get("extra_special_tokens"):
        settings["extra_special_tokens"] = settings.pop("additional_special_tokens")
    specific = {key: value for key, value in settings.items() if _is_own_name(key) and isinstance(value, str)}
    settings = {key: value for key, value in settings.items() if key not in specific}
    if isinstance(settings.get("extra_special_tokens"), dict):
        specific |= settings.pop("extra_special_tokens")
    return settings | ({"model_specific_special_tokens": specific} if specific else {})


def _is_own_name(key: str) -> bool:
    return key.endswith("_token") and key not in NAMES


def _with_added_tokens(
    folder: Path, settings: dict[str, Any], backend: Tokenizer
) -> tuple[dict[str, Any], dict[int, AddedToken]]:
    """Return the settings, with special tokens as described in the files, and the added tokens by id."""
    from tokenizers import AddedToken

    if (described := settings.pop("added_tokens_decoder", None)) is not None:
        added = {int(token_id): AddedToken(**token) for token_id, token in described.items()}
    else:
        settings |= _older_special_tokens(folder, settings)
        added = _older_added_tokens(folder, settings) | backend.get_added_tokens_decoder()
    settings = {key: _converted(value) for key, value in settings.items()}
    by_text = {str(token): token for token in added.values()}
    for name in NAMES:
        if settings.get(name) is not None:
            settings[name] = by_text.get(str(settings[name]), settings[name])
    return settings, added


def _older_special_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in special_tokens_map.json, including the extra tokens in `settings`."""
    from tokenizers import AddedToken

    def token(fields: dict[str, Any]) -> AddedToken:
        return AddedToken(**(fields | {"special": True}))

    found = _read_json(folder / SPECIAL_TOKENS)
    extra = found.get("extra_special_tokens")
    for key, value in found.items():
        if isinstance(value, dict) and key != "extra_special_tokens":
            found[key] = token(value)
    if isinstance(extra, list):
        merged = list(settings.get("extra_special_tokens") or [])
        for entry in extra:
            one = token(entry) if isinstance(entry, dict) else entry
            if one not in merged:
                merged.append(one)
        found["extra_special_tokens"] = merged
    elif isinstance(extra, dict):
        del found["extra_special_tokens"]
        own = settings.get("model_specific_special_tokens") or {}
        found["model_specific_special_tokens"] = own | extra
    return found


def _older_added_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Return the tokens in added_tokens.json by id."""
    from tokenizers import AddedToken

    special = {str(settings[name]) for name in NAMES if settings.get(name)}
    special |= {str(token) for token in settings.get("extra_special_tokens") or []}
    return {
        token_id: AddedToken(text, normalized=text not in special, special=text in special)
        for text, token_id in _read_json(folder / ADDED_TOKENS).items()
    }


def _converted(value: Any) -> Any:
    """Return a value in which each dict that describes an `AddedToken` is replaced with the token."""
    from tokenizers import AddedToken

    if isinstance(value, dict) and value.get("__type") == "AddedToken":
        return AddedToken(**{name: one for name, one in value.items() if name != "__type"})
    if isinstance(value, list):
        return [_converted(one) for one in value]
    if isinstance(value, dict):
        return {name: _converted(one) for name, one in value.items()}
    return value


def _special_tokens(
    settings: Mapping[str, Any], backend: Tokenizer
) -> tuple[dict[str, Token | None], list[Token]]:
    """Return the named special tokens as a dict, and a list of the others."""
    from tokenizers import AddedToken

    special: dict[str, Any] = {name: settings.get(name) for name in NAMES}
    if backend.padding is not None and "pad_token" not in settings:
        special["pad_token"] = backend.padding["pad_token"]
    special |= {
        key: value
        for key, value in settings.items()
        if _is_own_name(key) and isinstance(value, str | AddedToken)
    }
    special |= settings.get("model_specific_special_tokens") or {}
    for name, token in special.items():
        if not isinstance(token, str | AddedToken | None):
            raise TypeError(f"{name} of {SETTINGS} must be text")
    key = "extra_special_tokens" if "extra_special_tokens" in settings else "additional_special_tokens"
    extra = settings.get(key)
    if not isinstance(extra, list | None):
        raise TypeError(f"{key} of {SETTINGS} must be a list")
    return special, extra or []


def _add_missing(
    backend: Tokenizer, added: Mapping[int, AddedToken], special: Sequence[Token], extra: Iterable[Token]
) -> None:
    """Add the tokens that the backend lacks: first added tokens, by id, then special tokens, in order."""
    from tokenizers import AddedToken

    missing: list[Token] = [token for _, token in sorted(added.items(), key=lambda item: item[0])]
    known = {str(token) for token in (*backend.get_added_tokens_decoder().values(), *missing)}
    for token in (*special, *extra):
        if str(token) not in known and token not in missing:
            missing.append(token)
    named = set(map(str, special))
    tokens = [AddedToken(token, special=True) if isinstance(token, str) else token for token in missing]
    for token in tokens:
        if isinstance(token, AddedToken) and str(token) in named:
            token.special = True
    if tokens:
        backend.add_tokens(tokens)


def _set_post_processor(tokenizer: FastTokenizer, settings: Mapping[str, Any]) -> None:
    """Make the backend add BOS and EOS if the settings ask for it."""
    from tokenizers.processors import TemplateProcessing

    names = [name for name in ("bos_token", "eos_token") if settings.get(f"add_{name}")]
    texts = {
        name: tokenizer.special_tokens_map[name] for name in names if name in tokenizer.special_tokens_map
    }
    bos, eos = texts.get("bos_token"), texts.get("eos_token")

    def sequence(letter: str, type_id: int) -> list[str]:
        return [f"{part}:{type_id}" for part in (bos, f"${letter}", eos) if part is not None]

    first, second = sequence("A", 0), sequence("B", 1)
    tokenizer.backend.post_processor = TemplateProcessing(
        single=first,
        pair=first + second,
        special_tokens=[(text, tokenizer.token_id(name)) for name, text in texts.items()],
    )
