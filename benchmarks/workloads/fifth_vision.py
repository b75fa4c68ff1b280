"""Vision, with language and without, of the fifth set: layers, detection, augmentation and segmentation."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads.registry import Built, Size, half, integers, like, normal, pick, program

GROUP = "fifth"


@program("q-former-image-text-haiku", GROUP)
def _q_former(size: Size) -> Built:
    """Two layers of BLIP-2's Q-Former: queries and text attend together, queries also to the image; the matching head."""
    import haiku as hk

    b, queries, words, patches, image, n, h = pick(
        size, (64, 32, 32, 257, 1408, 768, 12), (6, 16, 16, 65, 160, 128, 4), (2, 3, 4, 5, 6, 8, 2)
    )
    dtype, d = half(size), n // h

    def dense(x, width, name):
        return hk.Linear(width, name=name)(x)

    def norm(x, name):
        return hk.LayerNorm(-1, create_scale=True, create_offset=True, eps=1e-12, name=name)(x)

    def attend(x, context, mask, name):
        q = dense(x, n, f"{name}_query").reshape(b, -1, h, d)
        k = dense(context, n, f"{name}_key").reshape(b, -1, h, d)
        v = dense(context, n, f"{name}_value").reshape(b, -1, h, d)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.asarray(np.sqrt(d), dtype)
        if mask is not None:
            scores = scores + (1.0 - mask[:, None, None, :].astype(dtype)) * np.asarray(-10000.0, dtype)
        weights = jax.nn.softmax(scores, axis=-1)
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(b, -1, n)
        return norm(x + dense(y, n, f"{name}_out"), f"{name}_norm")

    def feed(x, name):
        y = dense(jax.nn.gelu(dense(x, 4 * n, f"{name}_in"), approximate=False), n, f"{name}_out")
        return norm(x + y, f"{name}_norm")

    def model(tokens, seen, features):
        learned = hk.get_parameter("queries", (1, queries, n), dtype, hk.initializers.TruncatedNormal(0.02))
        table = hk.get_parameter("words", (pick(size, 30523, 1000, 11), n), dtype, hk.initializers.TruncatedNormal())
        places = hk.get_parameter("places", (words, n), dtype, hk.initializers.TruncatedNormal())
        x = jnp.concatenate([jnp.broadcast_to(learned, (b, queries, n)), table[tokens] + places], axis=1)
        x = norm(x, "embedding_norm")
        text = jnp.arange(words) < jnp.maximum(seen, 1)[:, None]
        mask = jnp.concatenate([jnp.ones((b, queries), bool), text], axis=1)
        for i in range(2):
            x = attend(x, x, mask, f"self{i}")
            q, text_part = x[:, :queries], x[:, queries:]
            if i % 2 == 0:
                q = attend(q, features, None, f"cross{i}")
            x = jnp.concatenate([feed(q, f"query_ffn{i}"), feed(text_part, f"text_ffn{i}")], axis=1)
        logits = dense(x[:, :queries], 2, "matching").astype(jnp.float32)
        return jax.nn.softmax(jnp.mean(logits, axis=1), axis=-1)[:, 1], x

    module = hk.without_apply_rng(hk.transform(model))
    tokens = integers(b, words, below=pick(size, 30523, 1000, 11))
    arguments = (tokens, integers(b, below=words + 1), normal(b, patches, image, dtype=dtype))
    shapes = jax.eval_shape(module.init, jax.random.key(0), *(a.struct for a in arguments))
    return Built(module.apply, (like(shapes, dtype), *arguments))


@program("dinov3-axial-rope-block-linen", GROUP)
def _dinov3(size: Size) -> Built:
    """Patches, registers and a block of DINOv3: rotations by two axes for patches alone, LayerScale, SwiGLU, class and patches."""
    from flax import linen as nn

    b, side, patch, n, h, wide = pick(
        size, (8, 512, 16, 1280, 20, 5120), (1, 224, 16, 192, 6, 512), (1, 8, 4, 16, 2, 12)
    )
    dtype, d, registers = half(size), n // h, 4
    grid = side // patch

    def angles():
        periods = 100.0 ** (2.0 * jnp.arange(d // 4) / (d // 2))
        centre = (jnp.arange(grid) + 0.5) / grid * 2.0 - 1.0
        rows, columns = jnp.meshgrid(centre, centre, indexing="ij")
        places = jnp.stack([rows, columns], axis=-1).reshape(-1, 2)
        angle = 2 * jnp.pi * places[:, :, None] / periods
        return jnp.tile(angle.reshape(grid * grid, -1), (1, 2))

    def rotate(x, sin, cos):
        prefix, patches = x[:, : 1 + registers], x[:, 1 + registers :]
        first, second = jnp.split(patches, 2, axis=-1)
        patches = patches * cos + jnp.concatenate([-second, first], axis=-1) * sin
        return jnp.concatenate([prefix, patches.astype(x.dtype)], axis=1)

    class LayerScale(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x * self.param("gamma", nn.initializers.constant(1e-5), (n,))

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, sin, cos):
            y = nn.LayerNorm(epsilon=1e-5, dtype=dtype)(x)
            q = nn.Dense(n, dtype=dtype, name="q")(y).reshape(b, -1, h, d)
            k = nn.Dense(n, use_bias=False, dtype=dtype, name="k")(y).reshape(b, -1, h, d)
            v = nn.Dense(n, dtype=dtype, name="v")(y).reshape(b, -1, h, d)
            y = jax.nn.dot_product_attention(rotate(q, sin, cos), rotate(k, sin, cos), v)
            y = nn.Dense(n, dtype=dtype, name="o")(y.reshape(b, -1, n))
            x = x + LayerScale()(y).astype(dtype)
            y = nn.LayerNorm(epsilon=1e-5, dtype=dtype)(x)
            y = nn.silu(nn.Dense(wide, dtype=dtype, name="w1")(y)) * nn.Dense(wide, dtype=dtype, name="w2")(y)
            return x + LayerScale()(nn.Dense(n, dtype=dtype, name="w3")(y)).astype(dtype)

    class Tower(nn.Module):
        @nn.compact
        def __call__(self, images):
            mean, std = jnp.array([0.485, 0.456, 0.406]), jnp.array([0.229, 0.224, 0.225])
            x = ((images - mean) / std).astype(dtype)
            x = nn.Conv(n, (patch, patch), strides=(patch, patch), dtype=dtype)(x).reshape(b, -1, n)
            first = self.param("class_and_registers", nn.initializers.normal(0.02), (1, 1 + registers, n))
            x = jnp.concatenate([jnp.broadcast_to(first, (b, 1 + registers, n)).astype(dtype), x], axis=1)
            angle = angles()[None, :, None, :]
            x = Block()(x, jnp.sin(angle).astype(dtype), jnp.cos(angle).astype(dtype))
            x = nn.LayerNorm(epsilon=1e-5, dtype=dtype)(x)
            patches = x[:, 1 + registers :].astype(jnp.float32)
            patches = patches / jnp.linalg.norm(patches, axis=-1, keepdims=True)
            return x[:, 0], patches.reshape(b, grid, grid, n)

    module = Tower()
    images = normal(b, side, side, 3, scale=0.25, offset=0.5)
    params = like(jax.eval_shape(module.init, jax.random.key(0), images.struct), dtype)
    return Built(module.apply, (params, images))


@program("masked-autoencoder-shuffle-grad", GROUP)
def _masked_autoencoder(size: Size) -> Built:
    """A masked autoencoder's gradient: a random quarter of the patches encoded, put back among mask tokens, pixels predicted."""
    from flax import linen as nn

    b, side, patch, n, h, m, heads = pick(
        size, (64, 224, 16, 768, 12, 512, 16), (4, 96, 16, 96, 4, 64, 4), (2, 8, 4, 8, 2, 8, 2)
    )
    dtype = half(size)
    grid = side // patch
    count = grid * grid
    kept = max(1, count // 4)

    def patches(images):
        x = images.reshape(b, grid, patch, grid, patch, 3)
        return jnp.einsum("bhpwqc->bhwpqc", x).reshape(b, count, patch * patch * 3)

    def sines(width):
        def axis(places, width):
            angle = np.outer(places, 1.0 / 10000 ** (np.arange(width // 2) / (width / 2)))
            return np.concatenate([np.sin(angle), np.cos(angle)], axis=1)

        rows, columns = np.divmod(np.arange(count), grid)
        return np.concatenate([axis(columns, width // 2), axis(rows, width // 2)], axis=1).astype(np.float32)

    class Block(nn.Module):
        width: int
        heads: int

        @nn.compact
        def __call__(self, x):
            y = nn.LayerNorm(epsilon=1e-6, dtype=dtype)(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=self.heads, dtype=dtype)(y, y)
            y = nn.LayerNorm(epsilon=1e-6, dtype=dtype)(x)
            y = nn.gelu(nn.Dense(4 * self.width, dtype=dtype)(y), approximate=False)
            return x + nn.Dense(self.width, dtype=dtype)(y)

    class Autoencoder(nn.Module):
        @nn.compact
        def __call__(self, x, key):
            x = nn.Dense(n, dtype=dtype, name="embed")(x.astype(dtype)) + jnp.asarray(sines(n), dtype)
            shuffle = jnp.argsort(jax.random.uniform(key, (b, count)), axis=1)
            restore = jnp.argsort(shuffle, axis=1)
            x = jnp.take_along_axis(x, shuffle[:, :kept, None], axis=1)
            first = self.param("class", nn.initializers.normal(0.02), (1, 1, n))
            x = jnp.concatenate([jnp.broadcast_to(first, (b, 1, n)).astype(dtype), x], axis=1)
            x = nn.LayerNorm(epsilon=1e-6, dtype=dtype)(Block(n, h)(x))
            x = nn.Dense(m, dtype=dtype, name="to_decoder")(x)
            blank = self.param("mask_token", nn.initializers.normal(0.02), (1, 1, m)).astype(dtype)
            full = jnp.concatenate([x[:, 1:], jnp.broadcast_to(blank, (b, count - kept, m))], axis=1)
            full = jnp.take_along_axis(full, restore[:, :, None], axis=1) + jnp.asarray(sines(m), dtype)
            x = Block(m, heads)(jnp.concatenate([x[:, :1], full], axis=1))
            x = nn.LayerNorm(epsilon=1e-6, dtype=dtype)(x)
            hidden = (restore >= kept).astype(jnp.float32)
            return nn.Dense(patch * patch * 3, dtype=dtype, name="pixels")(x)[:, 1:], hidden

    module = Autoencoder()

    def loss(params, images, seed):
        target = patches(images)
        predicted, hidden = module.apply(params, target, jax.random.key(seed))
        mean = jnp.mean(target, axis=-1, keepdims=True)
        var = jnp.var(target, axis=-1, keepdims=True, ddof=1)
        target = (target - mean) / jnp.sqrt(var + 1e-6)
        error = jnp.mean(jnp.square(predicted.astype(jnp.float32) - target), axis=-1)
        return jnp.sum(error * hidden) / jnp.sum(hidden)

    images = normal(b, side, side, 3)
    start = jax.ShapeDtypeStruct((b, count, patch * patch * 3), jnp.float32)
    params = like(jax.eval_shape(module.init, jax.random.key(0), start, jax.random.key(0)))
    return Built(jax.value_and_grad(loss), (params, images, integers(below=1000)))


@program("yolo-anchor-free-nms", GROUP)
def _yolo(size: Size) -> Built:
    """YOLOv8's detections: sides from distributions at three strides, class scores, the best boxes, greedy suppression."""
    b, side, classes, best, bins = pick(size, (16, 640, 80, 200, 16), (2, 416, 80, 100, 16), (1, 64, 3, 6, 4))
    dtype, strides = half(size), (8, 16, 32)

    def anchors():
        points, scale = [], []
        for stride in strides:
            g = side // stride
            y, x = np.mgrid[:g, :g].astype(np.float32) + 0.5
            points.append(np.stack([x, y], axis=-1).reshape(-1, 2))
            scale.append(np.full((g * g, 1), stride, np.float32))
        return np.concatenate(points), np.concatenate(scale)

    def overlap(boxes):
        low = jnp.maximum(boxes[:, None, :2], boxes[None, :, :2])
        high = jnp.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
        inter = jnp.prod(jnp.maximum(high - low, 0.0), axis=-1)
        area = jnp.prod(boxes[:, 2:] - boxes[:, :2], axis=-1)
        return inter / (area[:, None] + area[None, :] - inter + 1e-7)

    def suppress(boxes, scores, labels):
        apart = boxes + labels[:, None].astype(jnp.float32) * 2.0 * side
        covers = (overlap(apart) > 0.45) & (jnp.arange(best)[:, None] < jnp.arange(best)[None, :])

        def body(i, keep):
            return keep & ~(covers[i] & keep[i])

        return lax.fori_loop(0, best, body, scores > 0.25)

    def detect(levels):
        points, scale = anchors()
        flat = jnp.concatenate([x.reshape(b, -1, 4 * bins + classes) for x in levels], axis=1).astype(jnp.float32)
        sides, logits = flat[..., : 4 * bins], flat[..., 4 * bins :]
        sides = jax.nn.softmax(sides.reshape(b, -1, 4, bins), axis=-1) @ jnp.arange(bins, dtype=jnp.float32)
        boxes = jnp.concatenate([points - sides[..., :2], points + sides[..., 2:]], axis=-1) * scale
        probs = jax.nn.sigmoid(logits)
        score, label = jnp.max(probs, axis=-1), jnp.argmax(probs, axis=-1)
        score, at = lax.top_k(score, best)
        boxes = jnp.clip(jnp.take_along_axis(boxes, at[..., None], axis=1), 0.0, side)
        label = jnp.take_along_axis(label, at, axis=1)
        keep = jax.vmap(suppress)(boxes, score, label)
        return boxes, jnp.where(keep, score, 0.0), jnp.where(keep, label, -1), jnp.sum(keep, axis=1)

    outputs = [normal(b, side // s, side // s, 4 * bins + classes, dtype=dtype) for s in strides]
    return Built(detect, (outputs,))


@program("random-affine-colour-cutmix", GROUP)
def _augment(size: Size) -> Built:
    """A batch's augmentation on the accelerator: random affine views by interpolation, colours jittered, grey, CutMix, labels."""
    b, side, classes = pick(size, (128, 224, 1000), (8, 96, 100), (2, 8, 3))
    to_yiq = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.321], [0.211, -0.523, 0.311]], np.float32)
    to_rgb = np.linalg.inv(to_yiq).astype(np.float32)
    mean = np.array([0.485, 0.456, 0.406], np.float32)
    std = np.array([0.229, 0.224, 0.225], np.float32)

    def view(key, image):
        k1, k2, k3, k4, k5 = jax.random.split(key, 5)
        angle = jax.random.uniform(k1, (), minval=-0.3, maxval=0.3)
        zoom = jnp.sqrt(jax.random.uniform(k2, (), minval=0.3, maxval=1.0))
        shear = jax.random.uniform(k3, (), minval=-0.2, maxval=0.2)
        shift = jax.random.uniform(k4, (2,), minval=-1.0, maxval=1.0) * (1.0 - zoom) * side / 2
        flip = jnp.where(jax.random.bernoulli(k5), -1.0, 1.0)
        c, s = jnp.cos(angle), jnp.sin(angle)
        turn = jnp.array([[c, -s], [s + shear * c, c - shear * s]]) * zoom
        grid = jnp.stack(jnp.meshgrid(jnp.arange(side), jnp.arange(side), indexing="ij"))
        centred = (grid - (side - 1) / 2) * jnp.array([1.0, flip])[:, None, None]
        place = jnp.einsum("ij,jhw->ihw", turn, centred) + shift[:, None, None] + (side - 1) / 2

        def sample(channel):
            return jax.scipy.ndimage.map_coordinates(channel, list(place), order=1, mode="reflect")

        return jax.vmap(sample, in_axes=-1, out_axes=-1)(image)

    def colour(key, image):
        k1, k2, k3, k4, k5 = jax.random.split(key, 5)
        image = image * jax.random.uniform(k1, (), minval=0.6, maxval=1.4)
        grey = image @ to_yiq[0]
        contrast = jax.random.uniform(k2, (), minval=0.6, maxval=1.4)
        image = (image - jnp.mean(grey)) * contrast + jnp.mean(grey)
        turn = jax.random.uniform(k3, (), minval=-0.1, maxval=0.1) * 2 * jnp.pi
        c, s = jnp.cos(turn), jnp.sin(turn)
        more = jax.random.uniform(k4, (), minval=0.6, maxval=1.4)
        hue = jnp.array([[1.0, 0.0, 0.0], [0.0, c * more, -s * more], [0.0, s * more, c * more]])
        image = jnp.clip(image @ (to_rgb @ hue @ to_yiq).T, 0.0, 1.0)
        grey = jnp.broadcast_to((image @ to_yiq[0])[..., None], image.shape)
        return jnp.where(jax.random.bernoulli(k5, 0.2), grey, image)

    def cutmix(key, images, labels):
        k1, k2, k3 = jax.random.split(key, 3)
        other = jax.random.permutation(k1, b)
        edge = jnp.sqrt(1.0 - jax.random.beta(k2, 1.0, 1.0, (b, 1))) * side / 2
        centre = jax.random.uniform(k3, (b, 2), maxval=side)
        at = jnp.arange(side)[None, :]
        rows, columns = jnp.abs(at - centre[:, :1]) < edge, jnp.abs(at - centre[:, 1:]) < edge
        box = rows[:, :, None] & columns[:, None, :]
        mixed = jnp.where(box[..., None], images[other], images)
        share = jnp.mean(box, axis=(1, 2))[:, None]
        return mixed, labels * (1.0 - share) + labels[other] * share

    def augment(images, labels, seed):
        k1, k2, k3 = jax.random.split(jax.random.key(seed), 3)
        images = images.astype(jnp.float32) / 255.0
        images = jax.vmap(view)(jax.random.split(k1, b), images)
        images = jax.vmap(colour)(jax.random.split(k2, b), images)
        targets = 0.9 * jax.nn.one_hot(labels, classes) + 0.1 / classes
        images, targets = cutmix(k3, images, targets)
        return ((images - mean) / std).astype(half(size)), targets

    return Built(augment, (integers(b, side, side, 3, below=256), integers(b, below=classes), integers(below=1000)))


@program("atrous-pyramid-segmentation-linen", GROUP)
def _atrous(size: Size) -> Built:
    """DeepLabV3+'s head at inference: atrous convolutions with pooled context, a decoder with skips, upsampled labels."""
    from flax import linen as nn

    b, grid, n, low, wide, classes = pick(
        size, (8, 32, 1024, 256, 256, 21), (1, 12, 64, 24, 32, 21), (1, 4, 6, 4, 4, 3)
    )
    dtype = half(size)

    class ConvNorm(nn.Module):
        features: int
        kernel: int = 1
        dilation: int = 1
        groups: int = 1

        @nn.compact
        def __call__(self, x):
            k, r = (self.kernel, self.kernel), (self.dilation, self.dilation)
            x = nn.Conv(
                self.features,
                k,
                kernel_dilation=r,
                feature_group_count=self.groups,
                use_bias=False,
                dtype=dtype,
            )(x)
            return nn.relu(nn.BatchNorm(use_running_average=True, epsilon=1e-5, dtype=dtype)(x))

    class Pyramid(nn.Module):
        @nn.compact
        def __call__(self, x):
            branches = [ConvNorm(wide)(x)] + [ConvNorm(wide, 3, r)(x) for r in (6, 12, 18)]
            pooled = ConvNorm(wide)(jnp.mean(x, axis=(1, 2), keepdims=True))
            branches.append(jnp.broadcast_to(pooled, branches[0].shape))
            return ConvNorm(wide)(jnp.concatenate(branches, axis=-1))

    class Head(nn.Module):
        @nn.compact
        def __call__(self, deep, shallow):
            x = Pyramid()(deep)
            x = jax.image.resize(x, (*shallow.shape[:3], wide), "bilinear")
            x = jnp.concatenate([x, ConvNorm(max(1, wide * 3 // 16))(shallow)], axis=-1)
            for _ in range(2):
                x = ConvNorm(x.shape[-1], 3, groups=x.shape[-1])(x)
                x = ConvNorm(wide)(x)
            logits = nn.Conv(classes, (1, 1), dtype=dtype)(x).astype(jnp.float32)
            logits = jax.image.resize(logits, (b, grid * 16, grid * 16, classes), "bilinear")
            probs = jax.nn.softmax(logits, axis=-1)
            share = jnp.mean(probs, axis=(1, 2))
            return jnp.argmax(logits, axis=-1), jnp.max(probs, axis=-1), share

    module = Head()
    inputs = (normal(b, grid, grid, n, dtype=dtype), normal(b, 4 * grid, 4 * grid, low, dtype=dtype))
    shapes = jax.eval_shape(module.init, jax.random.key(0), *(x.struct for x in inputs))
    return Built(module.apply, (like(shapes, dtype), *inputs))
