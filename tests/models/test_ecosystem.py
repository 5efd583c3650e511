# SPDX-License-Identifier: Apache-2.0
"""The models with the tools of users: Auto classes, pipelines, Trainer, PEFT, TRL, Captum, sentence-transformers,
graphs."""

from importlib.metadata import version

import pytest
import torch
from datasets import Dataset
from packaging.version import Version
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    pipeline,
)

from nystrom_models.data import causal_tokenizer
from tests.compiler import needs_compiler
from tests.models.conftest import WORDS
from tests.models.options import language_model, make_model, relative_error

FAMILIES = ("nystromformer-landmarks", "linformer-layerwise", "linear-elu")


@pytest.fixture
def folder(request, tmp_path, tokenizer):
    """A saved model of a family and head, with its tokenizer."""
    option, head, fields = request.param
    make_model(option, head, vocab_size=len(tokenizer), pad_token_id=0, **fields).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def each_family(head, **fields):
    return pytest.mark.parametrize(
        "folder", [(option, head, fields) for option in FAMILIES], indirect=True, ids=FAMILIES
    )


def sentence(length):
    return " ".join(WORDS[index % len(WORDS)] for index in range(length))


@each_family("ForMaskedLM")
def test_fill_mask_at_any_length(folder):
    fill = pipeline("fill-mask", model=str(folder))
    assert type(fill.model).__module__.startswith("nystrom_models.")
    for length in (1, 14, 61):
        text = f"{sentence(length - 1)} <mask>"
        answers = fill(text, top_k=3)
        inputs = fill.tokenizer(text, return_tensors="pt")
        logits = fill.model(**inputs).logits[0, length]
        assert [answer["token"] for answer in answers] == logits.topk(3).indices.tolist()
    # Texts of different lengths in a batch get the same answers as alone.
    texts = [f"{sentence(length)} <mask>" for length in (3, 40, 20)]
    alone = [fill(text)[0] for text in texts]
    together = [answers[0] for answers in fill(texts, batch_size=3)]
    for one, other in zip(alone, together, strict=True):
        assert one["token"] == other["token"] and one["score"] == pytest.approx(other["score"], rel=1e-4)


ENTAILMENT = {"entailment": 0, "neutral": 1, "contradiction": 2}


@each_family("ForSequenceClassification", label2id=ENTAILMENT, id2label={id: name for name, id in ENTAILMENT.items()})
def test_text_classification_pipelines(folder):
    classify = pipeline("text-classification", model=str(folder), top_k=None)
    assert sum(answer["score"] for answer in classify(sentence(40))[0]) == pytest.approx(1)
    zero_shot = pipeline("zero-shot-classification", model=str(folder))
    answer = zero_shot(sentence(20), candidate_labels=["cat", "dog"], hypothesis_template="the {}")
    assert sorted(answer["labels"]) == ["cat", "dog"] and sum(answer["scores"]) == pytest.approx(1)


NUMBER = (1, [[7.5]], lambda logits: logits)
SEVERAL = (3, [[1.0, 0.0, 1.0]], torch.sigmoid)
ONE = (3, [1], lambda logits: logits.softmax(-1))


@pytest.mark.parametrize(
    ("kind", "compiled"),
    [
        (NUMBER, False),
        (SEVERAL, False),
        (ONE, False),
        pytest.param(SEVERAL, True, marks=pytest.mark.slow),
        pytest.param(NUMBER, True, marks=pytest.mark.slow),
        pytest.param(ONE, True, marks=pytest.mark.slow),
    ],
    ids=["number", "several", "one", "several-compiled", "number-compiled", "one-compiled"],
)
def test_a_saved_model_tells_pipelines_what_its_labels_were(kind, compiled, tokenizer, tmp_path):
    num_labels, labels, scores = kind
    model = make_model("linear-elu", "ForSequenceClassification", vocab_size=len(tokenizer), num_labels=num_labels)
    called = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    inputs = tokenizer(sentence(9), return_tensors="pt")
    logits = [called(**inputs, labels=torch.tensor(labels)).logits[0] for _ in range(2)][-1]
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    [answers] = pipeline("text-classification", model=str(tmp_path), top_k=None)(sentence(9))
    expected = {model.config.id2label[i]: score for i, score in enumerate(scores(logits).tolist())}
    assert {answer["label"]: answer["score"] for answer in answers} == pytest.approx(expected, rel=1e-4)


@each_family("ForTokenClassification", num_labels=3)
def test_token_classification_pipeline(folder):
    entities = pipeline("token-classification", model=str(folder), ignore_labels=[])(sentence(30))
    assert [entity["word"] for entity in entities] == sentence(30).split()


@pytest.mark.parametrize("layer", ["words", "embeddings", "last"])
@pytest.mark.parametrize("option", FAMILIES)
def test_attributions_with_captum(option, layer):
    """Integrated gradients of a padded batch sum to the difference of the outputs, and padding has none."""
    from captum.attr import LayerIntegratedGradients

    # By default, only the word embeddings have the shape of the batch.
    fields = {} if layer == "words" else {"unpad_inputs": False}
    model = make_model(option, "ForSequenceClassification", **fields)
    layers = {
        "words": model.get_input_embeddings(),
        "embeddings": model.base_model.embeddings,
        "last": model.base_model.encoder.layer[-1],
    }

    def probability(ids, mask):
        return model(input_ids=ids, attention_mask=mask).logits.softmax(dim=-1)[:, 0]

    ids, mask = torch.randint(5, 99, (2, 30)), torch.ones(2, 30, dtype=torch.long)
    mask[1, 12:] = 0
    baseline = torch.full_like(ids, 4)
    scores = LayerIntegratedGradients(probability, layers[layer]).attribute(
        ids, baseline, additional_forward_args=(mask,), n_steps=100
    )
    assert scores.shape == (2, 30, model.config.hidden_size) and not scores[1, 12:].any() and scores[1, :12].any()
    with torch.no_grad():
        expected = probability(ids, mask) - probability(baseline, mask)
    assert torch.allclose(scores.sum(dim=(1, 2)), expected, rtol=0, atol=2.4e-7)


@each_family("Model")
def test_feature_extraction_pipeline(folder):
    features = pipeline("feature-extraction", model=str(folder), return_tensors=True)(sentence(30))
    assert features.shape == (1, 32, 32)
    assert len(AutoTokenizer.from_pretrained(folder)(sentence(30)).input_ids) == 32
    assert type(AutoModel.from_pretrained(folder)).__module__.startswith("nystrom_models.")


@each_family("ForSequenceClassification", num_labels=2)
def test_trainer_learns_saves_and_reloads(folder, tokenizer, tmp_path):
    """Trainer, with accumulation, learns whether a sentence contains "cat"; answers are the same after a reload."""
    torch.manual_seed(0)
    texts = [" ".join(WORDS[i] for i in torch.randint(0, len(WORDS), (12,))) for _ in range(256)]
    data = [{**tokenizer(text), "labels": int("cat" in text.split())} for text in texts]
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "run"),
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        max_steps=60,
        learning_rate=3e-3,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model, arguments, train_dataset=data, processing_class=tokenizer)
    before = trainer.evaluate(data)["eval_loss"]
    trainer.train()
    assert trainer.evaluate(data)["eval_loss"] < 0.6 * before
    trainer.save_model(str(tmp_path / "trained"))
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "trained").eval()
    inputs = tokenizer(texts[:4], return_tensors="pt", padding=True)
    assert relative_error(again(**inputs).logits, model.eval()(**inputs).logits) < 1e-6


def logits_after_training(model, ids, learning_rate):
    """The logits of ids after two steps on them."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return model.eval()(input_ids=ids).logits


@each_family("ForMaskedLM")
def test_lora(folder, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    base = AutoModelForMaskedLM.from_pretrained(folder)
    ids = torch.randint(5, 25, (2, 30))
    plain = base.eval()(ids).logits
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["query", "value"]))
    tuned = logits_after_training(model, ids, learning_rate=10)
    assert not torch.allclose(tuned, plain)
    model.save_pretrained(tmp_path / "lora")
    again = PeftModel.from_pretrained(AutoModelForMaskedLM.from_pretrained(folder), tmp_path / "lora").eval()
    assert relative_error(again(input_ids=ids).logits, tuned) < 1e-6


@pytest.mark.parametrize("option", FAMILIES)
@torch.no_grad()
def test_an_adapter_for_each_row(option):
    """Of padded rows, of which otherwise only the tokens are computed, in one row."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["query", "value"], init_lora_weights=False)
    model = get_peft_model(make_model(option, "ForTokenClassification"), config, adapter_name="a").eval()
    model.add_adapter("b", config)
    ids, mask = torch.randint(3, 99, (3, 30)), torch.ones(3, 30, dtype=torch.long)
    mask[1, 10:] = mask[2, :20] = 0
    names = ["a", "b", "__base__"]
    logits = model(input_ids=ids, attention_mask=mask, adapter_names=names).logits
    for row, name in enumerate(names):
        valid = mask[row] == 1
        alone = model(input_ids=ids[row : row + 1, valid], adapter_names=[name]).logits[0]
        assert relative_error(logits[row, valid], alone) < 1e-5


@pytest.mark.parametrize("option", [*FAMILIES, "linear-causal"])
def test_lora_with_trained_tokens(option, tmp_path):
    """Added tokens are trained beside the adapters, in the tied head too; all other words stay as they are."""
    from peft import LoraConfig, PeftModel, get_peft_model

    def base():
        torch.manual_seed(0)
        model = language_model(option)
        model.resize_token_embeddings(101, mean_resizing=False)
        if (bias := model.get_output_embeddings().bias) is not None:
            bias.data.zero_()  # PEFT leaves out the bias of a head with tied weights, of a BERT too
        return model

    ids = torch.tensor([[5, 99, 7, 100, 9]])
    config = LoraConfig(target_modules=["query", "value"], trainable_token_indices={"word_embeddings": [99, 100]})
    model = get_peft_model(base(), config)
    tuned = logits_after_training(model, ids, learning_rate=1)
    model.save_pretrained(tmp_path)
    assert relative_error(PeftModel.from_pretrained(base(), tmp_path).eval()(input_ids=ids).logits, tuned) < 1e-6
    merged = model.merge_and_unload().eval()
    assert relative_error(merged(input_ids=ids).logits, tuned) < 1e-5
    changed = (merged.get_input_embeddings().weight != base().get_input_embeddings().weight).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [99, 100]


@pytest.mark.parametrize(
    "packing",
    [
        {"padding_free": True},
        {"packing": True},
        {"torch_compile": True, "torch_compile_backend": "eager", "packing": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_supervised_fine_tuning_with_trl(packing, tokenizer, tmp_path):
    """Texts of a row do not see each other: the loss is that of padded rows. The row may be longer than a text may."""
    from trl import SFTConfig, SFTTrainer

    if "torch_compile" in packing and Version(version("trl")) < Version("1.16"):
        pytest.skip("Older ones, as on Python 3.10, name the texts of a row only by position_ids.")
    tokenizer = causal_tokenizer(tokenizer)
    texts = Dataset.from_dict({"text": [" ".join(WORDS[:length]) for length in range(1, 9)]})
    fields = {"vocab_size": len(tokenizer), "max_position_embeddings": 20}
    losses = []  # of one batch of all texts
    for options in ({}, packing):
        settings = SFTConfig(
            str(tmp_path),
            **({"max_length": None if "padding_free" in options else 20} | options),
            per_device_train_batch_size=8,
            max_steps=1,
            learning_rate=0.0,
            bf16=False,
            use_cpu=True,
            report_to="none",
            logging_steps=1,
        )
        torch.manual_seed(0)
        model = make_model("linear-causal", "ForCausalLM", hidden_dropout_prob=0.0, **fields)
        trainer = SFTTrainer(model, settings, train_dataset=texts, processing_class=tokenizer)
        losses.append(trainer.train().training_loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_prompt_tuning():
    from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model

    def tuned(option, head, kind, task):
        return get_peft_model(make_model(option, head), kind(task_type=task, num_virtual_tokens=4))

    ids = torch.randint(3, 99, (2, 12))
    for option in FAMILIES:
        model = tuned(option, "ForSequenceClassification", PromptTuningConfig, "SEQ_CLS")
        model(input_ids=ids, labels=torch.tensor([0, 1])).loss.backward()
        assert model.prompt_encoder.default.embedding.weight.grad.any()
    model = tuned("linear-causal", "ForCausalLM", PromptTuningConfig, "CAUSAL_LM").train()
    model(input_ids=ids, labels=ids).loss.backward()
    assert model.prompt_encoder.default.embedding.weight.grad.any()
    assert model.eval().generate(input_ids=ids, max_new_tokens=5, pad_token_id=1, use_cache=False).shape == (2, 17)
    model = tuned("linear-causal", "ForCausalLM", PrefixTuningConfig, "CAUSAL_LM")
    with pytest.raises(ValueError, match=r"cannot hold the recurrent states.*prompt tuning or LoRA"):
        model(input_ids=ids, labels=ids)


@each_family("Model")
def test_sentence_transformers(folder, tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    encoder = Transformer(str(folder), max_seq_length=64)
    model = SentenceTransformer(modules=[encoder, Pooling(32)], device="cpu")
    texts = [sentence(3), sentence(50), sentence(20)]
    together = model.encode(texts, convert_to_tensor=True)
    alone = torch.stack([model.encode(text, convert_to_tensor=True) for text in texts])
    assert relative_error(together, alone) < 1e-5
    model.save(str(tmp_path / "sentences"))
    again = SentenceTransformer(str(tmp_path / "sentences"), device="cpu")
    assert relative_error(again.encode(texts, convert_to_tensor=True), together) < 1e-6


def test_sentence_transformers_of_texts_without_a_limit(tokenizer, tmp_path):
    """It takes the smaller of the tokenizer's limit and the model's, which must be a number. Given as the
    documentation says, this is saved."""
    from sentence_transformers import SentenceTransformer

    fields = {"position_embedding_type": "sinusoidal", "max_position_embeddings": None, "pad_token_id": 0}
    source = make_model("linear-elu", vocab_size=len(tokenizer), **fields)
    source.save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    limit = {"max_position_embeddings": 64}
    model = SentenceTransformer(str(tmp_path / "source"), device="cpu", config_kwargs=limit)
    texts = [sentence(3), sentence(100)]
    embeddings = model.encode(texts, convert_to_tensor=True)
    inputs = tokenizer(sentence(3), return_tensors="pt", return_token_type_ids=False)
    expected = source.eval()(**inputs).last_hidden_state.mean(dim=1)
    assert relative_error(embeddings[:1], expected) < 1e-5
    assert model.max_seq_length == 64
    model.save(str(tmp_path / "sentences"))
    again = SentenceTransformer(str(tmp_path / "sentences"), device="cpu")
    assert again.max_seq_length == 64
    assert torch.equal(again.encode(texts, convert_to_tensor=True), embeddings)


@pytest.mark.parametrize("option", FAMILIES)
def test_resized_and_tied_embeddings(option, tmp_path):
    model = make_model(option, "ForMaskedLM")
    model.resize_token_embeddings(120)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model(torch.full((1, 5), 119), labels=torch.full((1, 5), 119)).logits.shape == (1, 5, 120)
    model.save_pretrained(tmp_path)
    again = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight
    ids = torch.randint(3, 120, (1, 20))
    assert relative_error(again(ids).logits, model(ids).logits) < 1e-6


@pytest.mark.parametrize("option", FAMILIES)
@torch.no_grad()
def test_inputs_positions_and_chunks(option):
    model = make_model(option)
    ids = torch.randint(3, 99, (2, 30))
    plain = model(ids).last_hidden_state
    embeds = model.get_input_embeddings()(ids)
    assert relative_error(model(inputs_embeds=embeds).last_hidden_state, plain) < 1e-6
    first = model.config.first_position
    positions = torch.arange(first, first + 30).expand(2, 30)
    assert relative_error(model(ids, position_ids=positions).last_hidden_state, plain) < 1e-6
    assert not torch.allclose(model(ids, position_ids=positions.flip(1)).last_hidden_state, plain)
    assert relative_error(model(ids, token_type_ids=torch.zeros_like(ids)).last_hidden_state, plain) < 1e-6
    assert not torch.allclose(model(ids, token_type_ids=torch.ones_like(ids)).last_hidden_state, plain)
    # A row of token types or positions may be for all rows, also where only the valid tokens are computed.
    mask, types = torch.ones_like(ids), torch.arange(30).view(1, 30) // 20
    mask[1, 12:] = 0
    given = {"token_type_ids": types, "position_ids": positions[:1]}
    expected = model(ids, attention_mask=mask, **{name: row.expand(2, 30) for name, row in given.items()})
    assert torch.equal(model(ids, attention_mask=mask, **given).last_hidden_state, expected.last_hidden_state)
    states = model(ids, output_hidden_states=True).hidden_states
    assert len(states) == 3 and torch.equal(states[-1], plain)
    assert relative_error(model(ids, return_dict=False)[0], plain) < 1e-6
    chunked = make_model(option, chunk_size_feed_forward=10)
    chunked.load_state_dict(model.state_dict())
    torch.testing.assert_close(chunked(ids).last_hidden_state, plain)


GRAPH_OPTIONS = (
    "nystromformer-landmarks",
    "linformer-layerwise",
    "linformer-max_pool",
    "linformer-conv_none",
    "linear-elu",
    "linear-causal",
)


def shallow(option):
    """One layer and two steps of the pseudo-inverse are enough: tracing takes seconds for each."""
    fields = {"pinv_iterations": 2} if option.startswith("nystromformer") else {}
    return make_model(option, "ForMaskedLM", num_hidden_layers=1, **fields)


# Other tests compile, too: below, in a script with --torch_compile, and while decoding.


def slow_but(*quick):
    """The options, most of which are marked as slow, because they take long to compile."""
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in GRAPH_OPTIONS]


@pytest.mark.parametrize("option", slow_but("linformer-layerwise"))
def test_compile_without_graph_breaks(option):
    """Forward and backward in one graph, at lengths on both sides of the landmarks."""
    model = shallow(option)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (20, 9):
        ids = torch.randint(3, 99, (2, length))
        mask = torch.ones_like(ids)
        mask[0, : length // 2] = 0
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids}
        actual = compiled(**inputs)
        assert relative_error(actual.logits, model(**inputs).logits) < 1e-5
    actual.loss.backward()
    assert model.get_input_embeddings().weight.grad.abs().sum() > 0


EXAMPLE = {"input_ids": torch.ones(2, 20, dtype=torch.long), "attention_mask": torch.ones(2, 20, dtype=torch.long)}


def export(model, names=tuple(EXAMPLE)):
    """A program for these inputs, for up to 512 rows of up to 64 tokens."""
    shape = {0: torch.export.Dim("batch", min=1, max=512), 1: torch.export.Dim("length", min=1, max=64)}
    inputs = {name: EXAMPLE[name] for name in names}
    return torch.export.export(model, (), inputs, dynamic_shapes=dict.fromkeys(inputs, shape))


def check_every_size(exported, model, names=tuple(EXAMPLE)):
    for batch, length in ((1, 1), (3, 5), (2, 16), (4, 33), (1, 64)):
        new = {"input_ids": torch.randint(3, 99, (batch, length))}
        if "attention_mask" in names:
            new["attention_mask"] = torch.ones_like(new["input_ids"])
            new["attention_mask"][0, : length // 3] = 0
        assert relative_error(exported(**new).logits, model(**new).logits) < 1e-5


@pytest.mark.parametrize("option", slow_but("nystromformer-landmarks"))
@torch.no_grad()
def test_export_with_dynamic_batch_and_length(option):
    model = shallow(option)
    for names in (["input_ids"], list(EXAMPLE)):
        check_every_size(export(model, names).module(), model, names)


@torch.no_grad()
def test_export_with_a_chunked_feed_forward():
    model = make_model("linear-elu", "ForMaskedLM", num_hidden_layers=1, chunk_size_feed_forward=7)
    check_every_size(export(model).module(), model)


@torch.no_grad()
def test_export_of_a_causal_model_over_many_chunks():
    model = make_model("linear-causal", "ForCausalLM", num_hidden_layers=1, max_position_embeddings=512)
    model.config.use_cache = False
    shape = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=1, max=512)}
    exported = torch.export.export(model, (), EXAMPLE, dynamic_shapes=dict.fromkeys(EXAMPLE, shape)).module()
    for length in (1, 64, 65, 300, 512):
        ids = torch.randint(3, 99, (3, length))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        inputs["attention_mask"][0, : length // 3] = 0
        assert relative_error(exported(**inputs).logits, model(**inputs).logits) < 1e-5


@needs_compiler
@pytest.mark.slow  # one to two minutes for each
@pytest.mark.parametrize("option", FAMILIES)
def test_training_compiled_by_the_default_back_end(option):
    model = shallow(option)
    compiled = torch.compile(model, dynamic=True)
    for batch, length in ((3, 24), (4, 21), (3, 9)):
        ids = torch.randint(3, 99, (batch, length))
        mask = torch.ones_like(ids)
        mask[0, length // 2 :] = 0
        gradients = []
        for run in (model, compiled):
            model.zero_grad()
            run(ids, attention_mask=mask, labels=ids).loss.backward()
            gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
        assert relative_error(*reversed(gradients)) < 1e-5


@needs_compiler
@pytest.mark.slow  # half a minute for each
@pytest.mark.parametrize("option", FAMILIES)
@torch.no_grad()
def test_programs_compiled_ahead_of_time(option, tmp_path):
    model = shallow(option)
    package = torch._inductor.aoti_compile_and_package(export(model), package_path=str(tmp_path / "model.pt2"))
    check_every_size(torch._inductor.aoti_load_package(package), model)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("option", GRAPH_OPTIONS)
def test_torchscript_traces_of_every_length(option, tmp_path):
    """As in Transformers' guide, where gradients are not switched off; the trace is saved and loaded."""
    model = shallow(option)
    model.config.return_dict, model.config.use_cache = False, False
    ids, mask = torch.randint(3, 99, (2, 20)), torch.ones(2, 20, dtype=torch.long)
    for given in ((ids,), (ids, mask)):
        torch.jit.trace(model, given).save(tmp_path / "model.pt")
        traced = torch.jit.load(tmp_path / "model.pt")
        for batch, length in ((1, 1), (3, 5), (2, 16), (4, 33), (1, 64)):
            new = [torch.randint(3, 99, (batch, length)), torch.ones(batch, length, dtype=torch.long)][: len(given)]
            if len(given) == 2:
                new[1][0, length - length // 3 :] = 0
            assert relative_error(traced(*new)[0], model(*new)[0]) < 1e-5


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("option", GRAPH_OPTIONS)
def test_a_torchscript_trace_of_one_token_is_of_every_length(option):
    model = shallow(option)
    model.config.return_dict, model.config.use_cache = False, False
    traced = torch.jit.trace(model, (torch.full((1, 1), 5), torch.ones(1, 1, dtype=torch.long)))
    for batch, length in ((1, 1), (2, 9), (3, 33)):
        ids, mask = torch.randint(3, 99, (batch, length)), torch.ones(batch, length, dtype=torch.long)
        mask[0, length - length // 3 :] = 0
        assert relative_error(traced(ids, mask)[0], model(ids, mask)[0]) < 1e-5


@pytest.mark.parametrize("option", GRAPH_OPTIONS)
def test_fake_and_meta_tensors_show_shapes(option):
    """The meta device is used to plan memory and device maps; the values of a mask cannot be read there."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        model = shallow(option)
        ids = torch.randint(3, 99, (2, 30))
        outputs = model(ids, attention_mask=torch.ones_like(ids), labels=ids)
        assert outputs.logits.shape == (2, 30, 99) and outputs.loss.shape == ()
    with torch.device("meta"):
        model = shallow(option)
        ids = torch.zeros(2, 30, dtype=torch.long)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert model(ids, attention_mask=torch.ones_like(ids)).logits.is_meta
        assert model(ids, labels=ids).logits.shape == (2, 30, 99)


@pytest.mark.parametrize("option", slow_but())
@torch.no_grad()
def test_eager_attention_and_maps_compile_too(option):
    model = shallow(option)
    model.set_attn_implementation("eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    inputs = {"input_ids": torch.randint(3, 99, (2, 30)), "attention_mask": torch.ones(2, 30, dtype=torch.long)}
    inputs["attention_mask"][0, :9] = 0
    for wanted in ({}, {"output_attentions": True}):
        expected, actual = model(**inputs, **wanted), compiled(**inputs, **wanted)
        assert relative_error(actual.logits, expected.logits) < 1e-5
        for ours, theirs in zip(actual.attentions or (), expected.attentions or (), strict=True):
            assert relative_error(ours, theirs) < 1e-5
