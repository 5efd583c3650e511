# SPDX-License-Identifier: Apache-2.0
"""Small teachers of Transformers' own classes, each with its tokenizer, and models made of them."""

import json
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForPreTraining, AutoTokenizer

import nystrom_models
from nystrom_models.conversion import convert_checkpoint, converted_config
from nystrom_models.data import PretrainingCollator, RowLoader, load_files, pretraining_dataset
from nystrom_models.training import (
    OptimizationArguments,
    PretrainingObjective,
    create_accelerator,
    save_pretrained,
    train,
)
from nystrom_models.training.distillation import TeacherArguments, with_teacher
from nystrom_models.training.lora import add_lora
from nystrom_models.training.teacher import Teacher
from tests.models.options import TINY, enlarge

LENGTH = 30  # the longest row of the teachers
EXACT = {"num_landmarks": None, "conv_kernel_size": None}


def save_teacher(folder, kind, tokenizer, head="ForMaskedLM", **fields):
    """A model with weights large enough that attention matters, saved with the tokenizer."""
    torch.manual_seed(0)
    pad = tokenizer.pad_token_id
    common = TINY | {"vocab_size": len(tokenizer), "pad_token_id": pad, "max_position_embeddings": LENGTH}
    special = {
        "Roberta": {"max_position_embeddings": LENGTH + pad + 1, "type_vocab_size": 1},
        "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "dropout": 0.0},
        "Electra": {"embedding_size": 12},
        "Albert": {"embedding_size": 12, "num_hidden_groups": 2},
        "Linformer": {"projected_dim": 8},
    }.get(kind, {})
    if kind == "DistilBert":
        common = {name: common[name] for name in ("vocab_size", "pad_token_id", "max_position_embeddings")}
        common["attention_dropout"] = 0.0
    library = transformers if hasattr(transformers, kind + head) else nystrom_models
    config = getattr(library, kind + "Config")(**common | special | fields)
    model = enlarge(enlarge(getattr(library, kind + head)(config)))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def save_student(folder, source, family="nystromformer", **fields):
    """A model that is converted from a source, with its tokenizer."""
    config = converted_config(source, family, **fields)
    return convert_checkpoint(source, folder, config, head="ForPreTraining")


def train_taught(folder, lora_r=None):
    """Trains a model of `folder`/bert with that as its teacher, in double precision and on any number of processes,
    and leaves history and weights; called by test_recovery.py."""
    accelerator = create_accelerator()
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/bert")
    model = AutoModelForPreTraining.from_pretrained(f"{folder}/student").double()
    if lora_r is not None:
        add_lora(model, lora_r, 2.0 * lora_r, sentence_order=True)
    args = TeacherArguments(teacher_model_name_or_path=f"{folder}/bert", attention_matching_steps=3, alpha_cos=0.5)
    teacher = Teacher(args.teacher_model_name_or_path, tokenizer)
    teacher.model.double()
    objective = with_teacher(PretrainingObjective(), teacher, model, accelerator, args)
    documents = load_files(f"{folder}/train.txt", cache_dir=f"{folder}/cache")
    rows = pretraining_dataset(documents, tokenizer, 40, short_seq_prob=0.3)
    size = 6 // accelerator.num_processes
    loader = RowLoader(rows, PretrainingCollator(tokenizer), size)
    optimization = OptimizationArguments(size, learning_rate=1e-3, max_train_steps=6)
    state = train(accelerator, model, objective, loader, optimization, logging_steps=1)
    output = f"{folder}/{accelerator.num_processes}-{lora_r}"
    save_pretrained(accelerator, state.model, tokenizer, output)
    if accelerator.is_main_process:
        Path(output, "history.json").write_text(json.dumps(state.history))
