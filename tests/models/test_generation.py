# SPDX-License-Identifier: Apache-2.0
"""The causal family generates like any model of Transformers, with states of fixed size."""

import copy
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    CompileConfig,
    DynamicCache,
    GPT2Config,
    MambaConfig,
    PreTrainedTokenizerFast,
    StaticCache,
    TextStreamer,
    Trainer,
    TrainingArguments,
    default_data_collator,
    pipeline,
    set_seed,
)

import nystrom_models
from nystrom_models.data import train_byte_level_tokenizer
from nystrom_models.models.causal_head import next_labels
from nystrom_models.models.recurrent_cache import CACHE
from tests.models.options import TOLERANCE, make_model, relative_error

OPTIONS = ("linear-causal", "linear-causal_sinusoidal")
LENGTH = 24
NEW = 9

each_option = pytest.mark.parametrize("option", OPTIONS)


def make(option="linear-causal", **fields):
    """A model with untied weights: random tied weights would repeat one token forever."""
    return make_model(option, "ForCausalLM", **{"tie_word_embeddings": False} | fields)


def prompts(padding=5, rows=2):
    """Rows of 14 tokens; all but the first are padded on the left."""
    ids = torch.randint(3, 99, (rows, 14))
    mask = torch.ones_like(ids)
    mask[1:, :padding] = 0
    return ids, mask


def greedy(model, ids, mask=None, **options):
    return model.generate(ids, attention_mask=mask, **{"do_sample": False, "max_new_tokens": NEW} | options)


def cache_of(outputs):
    return getattr(outputs, CACHE)


# ---- states ----


@settings(max_examples=30)
@given(st.data())
@torch.no_grad()
def test_prefill_and_steps_are_the_whole(data):
    """For any split into parts, also into single tokens, with padding at any position."""
    model = make(data.draw(st.sampled_from(OPTIONS)))
    row = st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH)
    mask = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=3))).long()
    cuts = sorted(data.draw(st.lists(st.integers(1, LENGTH - 1), max_size=8, unique=True)))
    ids = torch.randint(3, 99, mask.shape)
    whole = model(ids, attention_mask=mask).logits
    cache, parts = None, []
    for start, stop in zip([0, *cuts], [*cuts, LENGTH], strict=True):
        # The mask of all tokens so far, as in Transformers, or of only these tokens.
        first = data.draw(st.sampled_from([0, start]))
        part = model(ids[:, start:stop], attention_mask=mask[:, first:stop], cache=cache, use_cache=True)
        cache = cache_of(part)
        parts.append(part.logits)
    assert isinstance(cache, DynamicCache)
    valid = mask.bool()
    if valid.any():
        assert relative_error(torch.cat(parts, dim=1)[valid], whole[valid]) < TOLERANCE[torch.float32]


def bytes_of(cache):
    states = (state for layer in cache.layers for state in layer.recurrent_states.values() if state is not None)
    return sum(state.numel() * state.element_size() for state in states)


@torch.no_grad()
def test_the_states_do_not_grow():
    model = make("linear-causal_sinusoidal", max_position_embeddings=None)
    cache, sizes = None, set()
    for length in (1, 1, 700, 3000, 1):
        cache = cache_of(model(torch.randint(3, 99, (2, length)), cache=cache, use_cache=True))
        sizes.add(bytes_of(cache))
    # 2 layers, 2 rows, 4 heads of 16 features and 8 + 1 sums; and the numbers of tokens.
    assert sizes == {2 * 2 * 4 * 16 * 9 * 4 + 2 * 2 * 8}


@pytest.mark.parametrize("unpad_inputs", [True, False])
@torch.no_grad()
def test_padding_after_the_last_position(unpad_inputs):
    """Padding has no position, so that the last part of the longest sequence may be padded."""
    model = make(unpad_inputs=unpad_inputs)
    ids, mask = torch.randint(3, 99, (2, 66)), torch.ones(2, 66, dtype=torch.long)
    mask[:, 64:] = mask[1, 63] = 0
    cache = cache_of(model(ids[:, :60], use_cache=True))
    found = model(ids[:, 60:], attention_mask=mask[:, 60:], cache=cache).logits
    expected = model(ids[:, :64]).logits[:, 60:]
    assert relative_error(found[:, :3], expected[:, :3]) < TOLERANCE[torch.float32]
    assert relative_error(found[0, 3], expected[0, 3]) < TOLERANCE[torch.float32]


def test_defaults_of_causal_models_and_encoders():
    causal = nystrom_models.LinearTransformerConfig(is_decoder=True)
    assert (causal.layer_norm_position, causal.classifier_pooling, causal.use_cache) == ("pre", "last", True)
    encoder = nystrom_models.LinearTransformerConfig()
    assert (encoder.layer_norm_position, encoder.classifier_pooling) == ("post", "first")
    softmax = nystrom_models.LinearTransformerConfig(is_decoder=True, feature_map=None)
    assert (softmax.layer_norm_position, softmax.use_cache) == ("pre", False)


@torch.no_grad()
def test_no_token_sees_a_later_one():
    for option in OPTIONS:
        model = make(option)
        ids = torch.randint(3, 99, (1, LENGTH))
        changed = ids.clone()
        changed[:, 9:] = torch.randint(3, 99, (1, LENGTH - 9))
        for mask in (None, (torch.arange(LENGTH) >= 4).long()[None]):
            before, after = (model(tokens, attention_mask=mask).logits[:, :9] for tokens in (ids, changed))
            assert torch.equal(before, after)


def test_states_carry_no_gradient_and_the_call_does():
    """A backward pass after a call with a cache ends at that call's tokens, and later calls do not disturb it."""
    model = make()
    ids = torch.randint(3, 99, (1, LENGTH))
    first = model(ids[:, :10], use_cache=True)
    second = model(ids[:, 10:], cache=cache_of(first), use_cache=True)
    model(ids[:, :3], cache=cache_of(first), use_cache=True)
    second.logits.square().sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    assert not any(
        state.requires_grad
        for layer in cache_of(first).layers
        for state in layer.recurrent_states.values()
        if state is not None
    )


# ---- generate ----


@each_option
def test_rows_padded_on_the_left_are_the_rows_alone(option):
    model = make(option)
    ids, mask = prompts()
    out = greedy(model, ids, mask)
    assert torch.equal(out, greedy(model, ids, mask, use_cache=False))
    assert torch.equal(out[1:, 14:], greedy(model, ids[1:, 5:])[:, 9:])
    assert torch.equal(out[:1], greedy(model, ids[:1]))
    # The content of padding does not matter.
    ids[1, :5] = 7
    assert torch.equal(out[1:, 14:], greedy(model, ids, mask)[1:, 14:])


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 4, "do_sample": False},
        {"num_beams": 3, "num_return_sequences": 3, "do_sample": False, "length_penalty": 0.5},
        {"do_sample": True, "temperature": 0.8, "top_k": 20},
        {"do_sample": True, "top_p": 0.9, "num_return_sequences": 2},
        {"num_beams": 2, "do_sample": True},
        {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    ],
    ids=lambda options: "-".join(options),
)
def test_every_way_to_decode_is_that_without_a_cache(options):
    model = make()
    ids, mask = prompts()
    outs = []
    for use_cache in (True, False):
        set_seed(5)
        outs.append(model.generate(ids, attention_mask=mask, max_new_tokens=NEW, use_cache=use_cache, **options))
    assert torch.equal(*outs)
    # The scores that Transformers returns are the same, too.
    set_seed(5)
    scored = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, return_dict_in_generate=True, output_scores=True, **options
    )
    assert torch.equal(scored.sequences, outs[0]) and isinstance(cache_of(scored), DynamicCache)


@each_option
def test_a_cache_is_given_back_and_continued(option):
    model = make(option)
    # Padded in the second row, in the first, in none.
    for ids, mask in (prompts(), [tensor.flip(0) for tensor in prompts()], prompts(padding=0)):
        once = greedy(model, ids, mask, max_new_tokens=2 * NEW)
        first = greedy(model, ids, mask, return_dict_in_generate=True)
        assert torch.equal(first.sequences, once[:, : 14 + NEW])
        whole = torch.cat([mask, torch.ones(2, NEW, dtype=torch.long)], dim=1)
        # The whole sequence, of which the cache contains all but the last token; or only that token.
        for tokens in (first.sequences, first.sequences[:, -1:]):
            cache = copy.deepcopy(cache_of(first))
            out = greedy(model, tokens, whole, **{CACHE: cache})
            assert torch.equal(out[:, -NEW:], once[:, -NEW:])


def test_a_cache_with_what_fills_up_a_row_is_not_continued():
    """After its end, a generated row is filled up with padding, which its states contain."""
    model, (ids, mask) = make(), prompts()
    once = greedy(model, ids, mask, eos_token_id=None)
    end = int(once[0, 16])
    first = greedy(model, ids, mask, eos_token_id=end, pad_token_id=1, return_dict_in_generate=True)
    longer = torch.cat([first.sequences, ids[:, :4]], dim=1)
    later = torch.cat([(first.sequences[:, 14:] != 1).long(), torch.ones(2, 4, dtype=torch.long)], dim=1)
    whole = torch.cat([mask, later], dim=1)
    assert (whole[0] == 0).any()
    with pytest.raises(ValueError, match=r"has seen 22 tokens of row 0, but attention_mask has 17 in these 22"):
        greedy(model, longer, whole, **{CACHE: copy.deepcopy(cache_of(first))})
    with pytest.raises(ValueError, match=r"has seen 22 tokens of row 0"):
        greedy(model, longer[:, 22:], whole, **{CACHE: cache_of(first)})


def test_a_cache_is_filled_by_a_call_and_then_generates():
    model = make()
    ids, _ = prompts()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :10], cache=cache)
    # A cache that is offloaded brings the states back to this device.
    assert {layer.device for layer in cache.layers} == {ids.device}
    assert torch.equal(greedy(model, ids, **{CACHE: cache}), greedy(model, ids))


def test_a_model_without_layers_has_no_states():
    model, (ids, mask) = make(num_hidden_layers=0), prompts()
    assert not model.config.use_cache
    assert greedy(model, ids, mask).shape == (2, 14 + NEW)
    with pytest.raises(
        ValueError, match=r"has no layer with a state of fixed size to continue from: use use_cache=False"
    ):
        model(ids, use_cache=True)


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_cache_is_filled_by_a_call_that_returns_maps(implementation):
    model, (ids, _) = make(conv_kernel_size=3), prompts()
    model.set_attn_implementation(implementation)
    whole = model(ids)
    first = model(ids[:, :10], output_attentions=True, use_cache=True)
    rest = model(ids[:, 10:], **{CACHE: cache_of(first)})
    assert first.attentions[0].shape == (2, 4, 10, 10)
    assert relative_error(rest.logits, whole.logits[:, 10:]) < TOLERANCE[torch.float32]


@each_option
@pytest.mark.parametrize("size", [1, 4, 14, 50])
def test_long_prompts_are_read_in_parts(option, size):
    model = make(option)
    ids, mask = prompts()
    assert torch.equal(greedy(model, ids, mask, prefill_chunk_size=size), greedy(model, ids, mask))
    first = greedy(model, ids, mask, return_dict_in_generate=True)
    whole = torch.cat([mask, torch.ones(2, NEW, dtype=torch.long)], dim=1)
    more = {CACHE: cache_of(first), "prefill_chunk_size": size}
    expected = greedy(model, first.sequences, whole)
    assert torch.equal(greedy(model, first.sequences, whole, **more), expected)


@pytest.mark.parametrize("option", [*OPTIONS, "linear-causal_softmax"])
def test_parts_of_a_prompt_need_a_cache(option):
    """Without one, only the last part would be read. A prompt of one part needs none."""
    model = make(option)
    ids, mask = prompts()
    with pytest.raises(ValueError, match=r"prefill_chunk_size .* only a cache keeps"):
        greedy(model, ids, mask, use_cache=False, prefill_chunk_size=4)
    whole = greedy(model, ids, mask, use_cache=False)
    assert torch.equal(greedy(model, ids, mask, use_cache=False, prefill_chunk_size=14), whole)


def test_generation_from_embeddings():
    model = make()
    ids, mask = prompts()
    embeds = model.get_input_embeddings()(ids)
    for options in ({}, {"prefill_chunk_size": 4}):
        out = model.generate(inputs_embeds=embeds, attention_mask=mask, do_sample=False, max_new_tokens=NEW, **options)
        assert torch.equal(out, greedy(model, ids, mask)[:, 14:])


def test_generation_with_token_types_and_positions():
    model = make()
    ids, mask = prompts()
    given = {"token_type_ids": torch.ones_like(ids), "position_ids": (mask.cumsum(1) - 1).clamp_min(0) + 3}
    outs = [greedy(model, ids, mask, use_cache=use_cache, **given) for use_cache in (True, False)]
    assert torch.equal(*outs) and not torch.equal(outs[0], greedy(model, ids, mask))


@pytest.mark.filterwarnings("ignore")
def test_decoding_is_one_graph_with_static_shapes():
    """`cache_implementation="static"` compiles each step; every length uses the same graph."""
    model = make("linear-causal_sinusoidal", max_position_embeddings=None, num_hidden_layers=1)
    config = CompileConfig(backend="aot_eager", fullgraph=True, dynamic=False)
    config._compile_all_devices = True
    ids, mask = prompts()
    expected = greedy(model, ids, mask, max_new_tokens=20)
    torch._dynamo.utils.counters.clear()
    out = greedy(model, ids, mask, max_new_tokens=20, cache_implementation="static", compile_config=config)
    assert torch.equal(out, expected)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    longer = torch.cat([ids, ids, ids], dim=1)
    expected = greedy(model, longer, max_new_tokens=20)
    out = greedy(model, longer, max_new_tokens=20, cache_implementation="static", compile_config=config)
    assert torch.equal(out, expected)
    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= graphs + 1


def test_the_softmax_control_generates_without_a_cache():
    model, (ids, mask) = make("linear-causal_softmax"), prompts()
    assert model.config.use_cache is False and cache_of(model(ids)) is None
    written = greedy(model, ids, mask)
    for row, padding in enumerate((0, 5)):
        alone = ids[row : row + 1, padding:]
        for _ in range(NEW):
            alone = torch.cat([alone, model(alone).logits[:, -1:].argmax(-1)], dim=1)
        assert written[row, padding:].tolist() == alone[0].tolist()
    with pytest.raises(ValueError, match=r"no layer with a state of fixed size.*use_cache=False"):
        model(ids, use_cache=True)
    for cache in (DynamicCache(), DynamicCache(config=GPT2Config())):
        with pytest.raises(ValueError, match=r"no layer with a state of fixed size.*use_cache=False"):
            greedy(model, ids, **{CACHE: cache})
    with pytest.raises(ValueError, match=r"feature_map=None has no states to continue from.*give input_ids"):
        model.generate(inputs_embeds=model.get_input_embeddings()(ids), max_new_tokens=2, use_cache=False)
    with pytest.raises(ValueError, match=r"feature_map=None.*use_cache=False"):
        nystrom_models.LinearTransformerConfig(is_decoder=True, feature_map=None, use_cache=True)
    with pytest.raises(ValueError, match=r"projected_dim .* needs a feature_map"):
        nystrom_models.LinearTransformerConfig(feature_map=None, projected_dim=8)


def test_what_a_state_cannot_do_is_refused_by_name():
    model, ids = make(), prompts()[0]
    for options in ({"assistant_model": make()}, {"prompt_lookup_num_tokens": 3}):
        with pytest.raises(
            ValueError, match=r"not supported with stateful models, such as LinearTransformerForCausalLM"
        ):
            model.generate(ids[:1], max_new_tokens=2, **options)
    cache = cache_of(model(ids, use_cache=True))
    with pytest.raises(RuntimeError, match="crop"):
        cache.crop(-1)
    with pytest.raises(ValueError, match=r"cannot hold the recurrent states.*DynamicCache\(config=model.config\)"):
        model(ids, cache=DynamicCache())
    with pytest.raises(ValueError, match=r"cannot hold the recurrent states.*DynamicCache\(config=model.config\)"):
        greedy(model, ids, **{CACHE: DynamicCache()})
    # Caches of models with other numbers of states and of layers.
    for config in (MambaConfig(num_hidden_layers=2), make(num_hidden_layers=3).config):
        with pytest.raises(ValueError, match=r"cannot hold the recurrent states of LinearTransformer"):
            model(ids, cache=DynamicCache(config=config))
    with pytest.raises(ValueError, match=r"states of 2 rows, but there are 1"):
        model(ids[:1], cache=cache)
    with pytest.raises(ValueError, match=r"output_attentions needs all tokens at once.*use_cache=False"):
        model(ids, cache=cache, output_attentions=True)
    with pytest.raises(ValueError, match=r"has seen 14 tokens, but the call has 3"):
        greedy(model, ids[:, :3], **{CACHE: cache})
    with pytest.raises(ValueError, match=r"longer than max_position_embeddings=64.*resize_position_embeddings"):
        model(torch.full((2, 51), 5), cache=cache)
    with pytest.raises(ValueError, match=r"longer than max_position_embeddings=64.*generate fewer tokens"):
        greedy(model, ids, max_new_tokens=52)
    with pytest.raises(ValueError, match=r"longer than max_position_embeddings=64: truncate the prompt"):
        greedy(model, torch.full((1, 70), 5), max_new_tokens=2)
    with pytest.raises(ValueError, match=r"sees no later token: leave is_causal=False out"):
        model(ids, is_causal=False)
    with pytest.raises(ValueError, match=r"encoder_hidden_states is for other decoders.*no cross-attention"):
        model(ids, encoder_hidden_states=torch.zeros(2, 14, 32))
    assert torch.equal(model(ids, is_causal=True, cache_position=torch.arange(14)).logits, model(ids).logits)
    model.train().gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=rf"{CACHE} cannot be combined with gradient checkpointing"):
        model(ids, cache=cache)
    with pytest.raises(ValueError, match=r"use LinearTransformerConfig\(is_decoder=True\)"):
        make_model("linear-elu", "ForCausalLM")


def test_a_mask_of_other_columns_is_refused():
    """As of texts that were truncated after their mask was made: which columns are meant is not known."""
    model, (ids, _) = make(), prompts()
    mask = torch.ones(2, 18, dtype=torch.long)
    mask[1, 14:] = 0
    for options in ({}, {"use_cache": False}, {"labels": ids}):
        with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 18\), but must be .*\(2, 14\)"):
            model(ids, attention_mask=mask, **options)
    for options in ({}, {"use_cache": False}):
        with pytest.raises(ValueError, match="attention_mask has 18 columns, but there are 14 tokens"):
            greedy(model, ids, mask, **options)
    cache = cache_of(model(ids[:, :10]))
    with pytest.raises(ValueError, match="attention_mask has 18 columns, but must have those of the 4 new tokens"):
        model(ids[:, 10:], attention_mask=mask, cache=cache)
    continued = model(ids[:, 10:], attention_mask=mask[:, :14], cache=cache).logits
    assert relative_error(continued, model(ids).logits[:, 10:]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("option", [*OPTIONS, "linear-causal_softmax"])
def test_a_prompt_that_ends_in_padding_is_refused(option):
    """The next token would be predicted from a state of padding, which is zero, and be the first one of the
    vocabulary."""
    model, (ids, _) = make(option), prompts()
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    message = r'padding in its last column.*pad on the left, with tokenizer.padding_side = "left"'
    for options in ({}, {"use_cache": False}, {"num_beams": 2}):
        with pytest.raises(ValueError, match=message):
            greedy(model, ids, mask, **options)
    if model.config.has_states:
        with pytest.raises(ValueError, match=message):
            greedy(model, ids, mask, prefill_chunk_size=4)
        with pytest.raises(ValueError, match=message):
            greedy(model, None, mask, inputs_embeds=model.get_input_embeddings()(ids))
    # A call, which returns the logits of every token, takes such rows.
    assert relative_error(model(ids, attention_mask=mask).logits[1:, :9], model(ids[1:, :9]).logits) < 1e-5


def test_both_names_of_a_cache():
    """Transformers 5.24 calls past_key_values cache; calls of either name give the same with any version."""
    model, (ids, _) = make(), prompts()
    caches = [cache_of(model(ids[:, :10])) for _ in range(2)]
    outputs = model(ids[:, 10:], cache=caches[0]), model(ids[:, 10:], past_key_values=caches[1])
    assert torch.equal(outputs[0].logits, outputs[1].logits) and CACHE in outputs[0]
    assert relative_error(outputs[0].logits, model(ids).logits[:, 10:]) < TOLERANCE[torch.float32]
    with pytest.raises(ValueError, match=r"two names of the same argument"):
        model(ids, cache=caches[0], past_key_values=caches[1])
    with pytest.raises(ValueError, match=r"two names of the same argument"):
        model.base_model(ids, cache=caches[0], past_key_values=caches[1])


def test_static_caches_and_offloaded_ones():
    model = make()
    ids, mask = prompts()
    expected = greedy(model, ids, mask)
    cache = StaticCache(model.config, max_cache_len=64)
    assert torch.equal(greedy(model, ids, mask, **{CACHE: cache}), expected)
    cache.reset()
    assert torch.equal(greedy(model, ids, mask, **{CACHE: cache}), expected)


# ---- text ----

WORDS = ["<pad>", "<s>", "</s>", "<unk>", *"the a cat dog sat ran on under mat table and then slept".split()]


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    """A folder with a causal model and its tokenizer."""
    folder = tmp_path_factory.mktemp("writer")
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special).save_pretrained(folder)
    torch.manual_seed(1)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    make(vocab_size=len(WORDS), **special).save_pretrained(folder)
    return str(folder)


def test_pipeline_writes_texts_of_several_lengths(writer):
    generate = pipeline("text-generation", model=writer, device="cpu", batch_size=2)
    assert type(generate.model) is nystrom_models.LinearTransformerForCausalLM
    texts = ["the cat sat on", "a dog", "the mat and then the dog"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        together = generate(texts, max_new_tokens=6, do_sample=False)
        alone = [generate(text, max_new_tokens=6, do_sample=False) for text in texts]
    assert together == alone and all(
        text in answer[0]["generated_text"] for text, answer in zip(texts, alone, strict=True)
    )


def test_generation_ends_at_a_string():
    tokenizer = train_byte_level_tokenizer(["the cat sat on the mat"] * 4, vocab_size=270, show_progress=False)
    model = make(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=2, pad_token_id=1)
    inputs = tokenizer("the cat", return_tensors="pt")
    whole = greedy(model, inputs["input_ids"], eos_token_id=None)
    start = inputs["input_ids"].shape[1]
    # The last letter that is written for the first time.
    words = [tokenizer.decode(token) for token in whole[0, start:]]
    last = max(i for i, word in enumerate(words) if word.isalpha() and not any(word in other for other in words[:i]))
    out = greedy(model, inputs["input_ids"], eos_token_id=None, stop_strings=[words[last]], tokenizer=tokenizer)
    assert torch.equal(out, whole[:, : start + last + 1])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_trainer_evaluates_and_predicts_the_next_token(smoothing, tmp_path):
    model = make()
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, 99, (6, 20)).tolist()]
    arguments = TrainingArguments(
        str(tmp_path), label_smoothing_factor=smoothing, report_to=[], use_cpu=True, disable_tqdm=True
    )
    found = Trainer(model, arguments, eval_dataset=rows, data_collator=default_data_collator).evaluate()
    inputs = torch.tensor([row["input_ids"] for row in rows])
    with torch.no_grad():
        logits = model.eval()(inputs).logits[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(logits, inputs[:, 1:].flatten(), label_smoothing=smoothing)
    assert float(found["eval_loss"]) == pytest.approx(expected.item(), abs=1e-3)  # Transformers 5.24 rounds it


def test_streamed_words_are_the_text(writer, capsys):
    model = AutoModelForCausalLM.from_pretrained(writer)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(writer)
    inputs = tokenizer("the cat sat", return_tensors="pt", return_token_type_ids=False)
    out = model.generate(**inputs, max_new_tokens=8, do_sample=False, streamer=TextStreamer(tokenizer))
    assert len(set(out[0].tolist())) > 5
    assert capsys.readouterr().out.split() == tokenizer.decode(out[0]).split()


# ---- the loss ----


@pytest.mark.parametrize("padded", [False, True])
def test_loss_is_that_of_each_row_alone(padded):
    model = make()
    ids, mask = torch.randint(3, 99, (3, 20)), torch.ones(3, 20, dtype=torch.long)
    if padded:
        mask[0, 13:] = mask[1, :6] = mask[2, 4:9] = 0
    labels = ids.clone()
    labels[0, 3] = -100
    logits = model(ids, attention_mask=mask, labels=labels).logits
    total, count = 0.0, 0
    for row in range(3):
        valid = mask[row].bool()
        log_p = torch.log_softmax(logits[row, valid].double(), dim=-1)[:-1]
        targets = labels[row, valid][1:]
        kept = targets != -100
        total -= log_p[kept].gather(1, targets[kept][:, None]).sum()
        count += int(kept.sum())
    out = model(ids, attention_mask=mask, labels=labels)
    assert abs(out.loss.item() - total.item() / count) < 1e-5
    divided = model(ids, attention_mask=mask, labels=labels, num_items_in_batch=torch.tensor(7)).loss
    assert abs(divided.item() - total.item() / 7) < 1e-4
    aligned = model(ids, attention_mask=mask, shift_labels=next_labels(labels, mask)).loss
    assert torch.equal(aligned, out.loss)
    assert model(ids[:, :1], labels=labels[:, :1]).loss == 0


def test_next_labels_skip_padding():
    labels, mask = torch.arange(6)[None], torch.tensor([[0, 1, 0, 1, 1, 0]])
    assert next_labels(labels, mask).tolist() == [[-100, 3, -100, 4, -100, -100]]
    assert next_labels(labels, None).tolist() == [[1, 2, 3, 4, 5, -100]]


def test_logits_to_keep():
    model, ids = make(), torch.randint(3, 99, (2, 12))
    with torch.no_grad():
        logits = model(ids).logits
        assert torch.allclose(model(ids, logits_to_keep=2).logits, logits[:, -2:], atol=1e-5)
        assert torch.allclose(model(ids, logits_to_keep=torch.tensor([3, 0])).logits, logits[:, [3, 0]], atol=1e-5)
    with pytest.raises(ValueError, match="logits_to_keep drops logits"):
        model(ids, labels=ids, logits_to_keep=1)


def test_tied_and_untied_embeddings():
    tied, untied = make(tie_word_embeddings=True), make()
    assert tied.lm_head.weight is tied.get_input_embeddings().weight
    assert untied.lm_head.weight is not untied.get_input_embeddings().weight
    tied.resize_token_embeddings(120)
    assert tied.lm_head.weight.shape == (120, 32) and tied(torch.full((1, 3), 119)).logits.shape[-1] == 120


def test_caches_and_training():
    model, ids = make(), torch.randint(3, 99, (2, 12))
    assert cache_of(model(ids)) is not None and cache_of(model(ids, use_cache=False)) is None
    model.train()
    assert cache_of(model(ids)) is None and cache_of(model(ids, use_cache=True)) is not None
    written = greedy(model, ids)
    model.gradient_checkpointing_enable()
    assert cache_of(model(ids, use_cache=True)) is None
    # In evaluation mode layers run once, too.
    assert cache_of(model.eval()(ids, use_cache=True)) is not None
    model.train()
    # Without gradients layers run once: models generate between steps of training.
    assert torch.equal(greedy(model, ids), written)


@pytest.mark.parametrize("way", ["asked for", "not asked for", "switched off", "off in the configuration", "training"])
def test_given_states_are_always_read(way):
    model, ids = make(), torch.randint(3, 99, (2, 12))
    whole = model(ids).logits[:, 7:]
    cache = cache_of(model(ids[:, :7], use_cache=True))
    options = {"asked for": {"use_cache": True}, "switched off": {"use_cache": False}}.get(way, {})
    model.train(way == "training")
    model.config.use_cache = way != "off in the configuration"
    outputs = model(ids[:, 7:], cache=cache, **options)
    assert relative_error(outputs.logits, whole) < TOLERANCE[torch.float32]
    assert (cache_of(outputs) is None) == (way == "switched off")


@torch.no_grad()
def test_classes_come_from_the_last_valid_token():
    model = make_model("linear-causal", "ForSequenceClassification", num_labels=3)
    ids, mask = torch.randint(3, 99, (2, LENGTH)), torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, 15:] = mask[1, :9] = 0
    logits = model(ids, attention_mask=mask).logits
    for row, valid in enumerate(mask.bool()):
        alone = model(ids[row : row + 1, valid]).logits
        assert relative_error(logits[row : row + 1], alone) < TOLERANCE[torch.float32]
        changed = ids[row : row + 1, valid].clone()
        changed[:, 0] = 3 + changed[:, 0] % 90
        assert not torch.equal(model(changed).logits, alone)


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_new_tokens_are_classified_with_a_mask_of_all_columns(pooling):
    model = make_model("linear-causal", "ForSequenceClassification", classifier_pooling=pooling)
    ids, mask = torch.randint(3, 99, (2, LENGTH)), torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 15:] = 0
    logits = []
    for columns in (mask, mask[:, 10:]):
        cache = DynamicCache(config=model.config)
        model(ids[:, :10], mask[:, :10], **{CACHE: cache})
        logits.append(model(ids[:, 10:], columns, **{CACHE: cache}).logits)
    assert torch.equal(*logits)


@torch.no_grad()
@pytest.mark.parametrize("head", ["ForTokenClassification", "ForQuestionAnswering"])
def test_losses_of_new_tokens_with_a_mask_of_all_columns(head):
    model = make_model("linear-causal", head)
    ids, mask = torch.randint(3, 99, (2, LENGTH)), torch.ones(2, LENGTH, dtype=torch.long)
    # The third of the new tokens is valid, that of all columns is not.
    mask[1, :4] = mask[1, 15:] = 0
    places = torch.tensor([7, 2])
    targets = {"start_positions": places, "end_positions": places}
    if head == "ForTokenClassification":
        targets = {"labels": torch.randint(0, 2, (2, LENGTH - 10))}
    losses = []
    for columns in (mask, mask[:, 10:]):
        cache = DynamicCache(config=model.config)
        model(ids[:, :10], mask[:, :10], **{CACHE: cache})
        losses.append(model(ids[:, 10:], columns, **targets, **{CACHE: cache}).loss)
    assert torch.equal(*losses)
