"""Secrets to plant, each with a marker that must not come out, and harmless look-alikes, which must."""

from __future__ import annotations

from dataclasses import dataclass

# What a secret may be called.
NAMES = """
    password db_password PGPASSWORD dbPassword passwd ssh-passphrase pass db_pass smtp_pass DBPASS pw MYSQL_PW pwd
    DB_PWD smtp_pwd key api_key apiKey openaiKey API_KEY_WANDB encryption_key_hex aws_secret_access_key private_key
    sshKey token HF_TOKEN huggingface_token SLACK_BOT_TOKEN AWS_SESSION_TOKEN wandb_token gitlab-token refresh_token
    bearer_token jwt_token session_token authtoken auth Authorization Proxy-Authorization secret client_secret
    credentials cookie sentry_dsn request_signature sig AccountKey GH_PAT
""".split()  # fmt: skip  # noqa: SIM905

# What a secret may look like, whatever it is called; {} is the marker.
SHAPES = (
    "Bearer {}",
    "Basic {}aGVsbG8gd29ybGQ=",
    "-----BEGIN RSA PRIVATE KEY-----\n{}MIIEpAIBAAKCAQEA\n{}dGhlIHNlY29uZCBsaW5l\n-----END RSA PRIVATE KEY-----",
    "github_pat_{}11AAAAAAA0abcdefghij",
    "ghp_{}abcdefghijklmnopqrstuvwxyz",
    "hf_{}abcdefghijklmnopqrstuvwxyz",
    "sk-proj-{}abcdefghijklmnopqrst",
    "sk_live_{}abcdefghijklmnop",
    "glpat-{}abcdefghijklm",
    "AKIA{}ABCDEFGHI",
    "ASIA{}ABCDEFGHI",
    "AIzaSy{}abcdefghijklmnopqrstuvwxyz",
    "xoxb-123456789012-{}abcdefghijkl",
    "https://hooks.slack.com/services/T000/B000/{}abcdef",
    "npm_{}abcdefghijklmnopqrstuvwxyz",
    "pypi-AgEIcHlwaS5vcmc{}abcdef",
    "eyJhbGciOiJIUzI1NiJ9.{}eyJzdWIiOiIxIn0.abc-{}def",
    "https://host/data?epoch=3&api_key={}&part=2",
    "https://store/file?sv=2024&sig={}%2Babc",
    "https://bucket/file?X-Amz-Date=2024&X-Amz-Signature={}abc",
    "DefaultEndpointsProtocol=https;AccountName=me;AccountKey={}abc==;EndpointSuffix=core",
    "postgres://me:{}@db:5432/runs",
    "https://me:a/{}/b@host/path",
    "git clone https://{}@github.com/me/it",
    "mysql --host db --password {} runs",
    "DB_PASS={} python prepare.py",
    "curl -u me:{} http://host/",
)

# Called like a secret by somebody who reads too fast.
HARMLESS_NAMES = """
    eos_token bos_token pad_token unk_token sep_token cls_token mask_token class_token image_token video_token
    audio_token start_token end_token stop_token prompt_token separator_token special_token text_token word_token
    first_token last_token next_token prev_token extra_token eosToken padToken vision_token query_token unknown_token
    eos_token_id pad_token_id bos_token_ids decoder_start_token_id image_token_index token_type_ids token_type token_dim
    token_embedding token_dropout token_mixing token_count token_limit token_length token_merging token_level
    max_tokens min_tokens num_tokens n_tokens max_new_tokens maxTokens tokens_per_batch tokens_per_step tokens_seen
    total_tokens train_tokens special_tokens additional_special_tokens num_image_tokens register_tokens patch_tokens
    context_tokens warmup_tokens tokenizer tokenizer_name tokenize tokenized tokenization tokenizers_parallelism
    detokenize pretokenizer subtokens
    author authors authored_by co_author authority authentic authenticity
    sort_key image_key label_key input_key target_key text_key batch_key sample_key caption_key primary_key foreign_key
    group_key cache_key dict_key index_key column_key partition_key row_key query_key state_key metric_key loss_key
    feature_key features_key public_key value_key mask_key video_key sortKey imageKey
    key_dim key_size key_length key_padding_mask key_proj key_states key_value key_bias key_frame keyframe keyframes
    keyboard keypoint keypoints keypoint_weights keyword keywords keyed keys num_keys image_keys missing_keys
    unexpected_keys state_dict_keys query_key_value n_keys ignore_keys monkey donkey turkey keynote
    pass_rate passes num_passes max_passes forward_pass backward_pass first_pass second_pass_lr single_pass multi_pass
    low_pass high_pass low_pass_filter band_pass pass_through passthrough bypass by_pass passenger passengers passage
    passages compass compassion passive passed surpass encompass overpass two_pass pass_k pass_mask
    private_split private_leaderboard privately privateer
    secretary secretariat secretarial
    cookiecutter cookiecutters credit credits accreditation incredible
    signature_dim signature_version input_signature model_signature sigma sigmoid sigmas significance sigint signal
    design designer assign assigned resign signed unsigned
    auth_type auth_method password_file secret_dir credentials_path token_path key_file api_key_file password_length
    pattern patience patch patches path paths pat_size pwm spawn dsn_type otpimal hotpath
    bearing forbearance cookies_dir webhook_timeout
""".split()  # fmt: skip  # noqa: SIM905

# Looks like a secret to somebody who reads too fast; {} is the marker.
HARMLESS_SHAPES = (
    "image:{}@sha256:0f0f0f0f",
    "git@github.com:me/{}.git",
    "ssh://git@host/{}.git",
    "git+https://github.com/me/{}@v1.2",
    "https://host:8080/{}/@scope/package",
    "https://host/data?epoch=3&part={}",
    "s3://bucket/{}/part-0001.tar",
    "sk-learn-{}",
    "hf_hub_{}",
    "mailto:{}@host.org",
    "basic training {}",
    "BasicBlock{}",
    "-----{}-----",
    "-----BEGIN CERTIFICATE----- {} -----END CERTIFICATE-----",
    "0123456789abcdef{}",
    "{}:12",
    "configs/{}.yaml:12",
    "lr=0.1,name={}",
    "--name {} --lr 0.1",
    "python -u {}.py",
    "epoch 3: {} of 12",
    "12:30:05 {}",
    "AKITA{}",
    "eyJ{}",
    "task-{}",
    "disk-{}-0000000000000000",
    "KeyError: '{}'",
    "tokens/s: {}",
    "author: {}",
    "the tokenizer {}",
)


@dataclass(frozen=True)
class Planted:
    """A name, a value that holds the marker, and the marker."""

    name: str
    value: str
    marker: str


def secrets(count: int, start: int = 0) -> list[Planted]:
    """So many, of every spelling in turn. Those that only their shape gives away have a harmless name."""
    return _planted("LEAK", NAMES, SHAPES, count, start)


def look_alikes(count: int, start: int = 0) -> list[Planted]:
    """So many that are none."""
    return _planted("FINE", HARMLESS_NAMES, HARMLESS_SHAPES, count, start)


def _planted(word: str, names: list[str], shapes: tuple[str, ...], count: int, start: int) -> list[Planted]:
    made = []
    for number in range(start, start + count):
        marker, place = f"{word}{number:03d}", number % (len(names) + len(shapes))
        if place < len(names):
            made.append(Planted(names[place], f"{marker}x", marker))
        else:
            made.append(Planted(f"note_{number}", shapes[place - len(names)].replace("{}", marker), marker))
    return made


def found(text: str, planted: list[Planted]) -> set[str]:
    """The markers that a text holds."""
    return {one.marker for one in planted if one.marker in text}
