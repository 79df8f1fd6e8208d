# Longtake for machines with NVIDIA GPUs (driver 580 or later, NVIDIA Container Toolkit):
#   docker build -t longtake .
#   docker run --rm --gpus all --ipc=host -u "$(id -u):$(id -g)" -v "$PWD:/work" longtake train custom --dataset.data-path clips
FROM nvidia/cuda:13.0.2-base-ubuntu24.04

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# gcc and Python's headers: Triton compiles a launcher for each kernel. OpenSSH's client: `longtake launch`.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates gcc libc6-dev openssh-client python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

COPY pyproject.toml README.md LICENSE /src/
COPY longtake /src/longtake

# PyTorch's wheels bring CUDA's libraries, cuDNN and NCCL.
RUN python3 -m venv /opt/longtake \
    && /opt/longtake/bin/pip install --no-cache-dir '/src[encoders,fp8,ui,wandb]'

# USER and HOME for a user that has no entry in /etc/passwd, as `-u` makes one.
ENV PATH=/opt/longtake/bin:$PATH HOME=/work USER=longtake HF_HOME=/work/.cache/huggingface
WORKDIR /work
USER 1000:1000
ENTRYPOINT ["longtake"]
CMD ["--help"]
