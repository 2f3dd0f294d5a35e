"""Own text about dishes and cuisines: the part of the demo model's data written for it.

Everything in this file was written for this project and shares its licence.  Queries name a
cuisine and stop where the dish is expected; documents name a dish with the ending that the
query asks for.  A whole query is one opening and one closing, joined by a newline or a space.
"""

import hashlib
import random
from dataclasses import dataclass

DISHES: dict[str, tuple[str, ...]] = {
    "한식": (
        *("된장찌개", "김치찌개", "비빔밥", "불고기", "갈비탕", "삼계탕", "물냉면", "잡채"),
        *("순두부찌개", "육개장", "설렁탕", "제육볶음", "갈비찜", "보쌈", "감자탕", "청국장"),
        *("콩나물국밥", "칼국수", "수제비", "닭갈비", "미역국", "파전", "삼겹살", "부대찌개"),
    ),
    "중식": (
        *("짜장면", "짬뽕", "탕수육", "마파두부", "깐풍기", "양장피", "유산슬", "라조기"),
        *("고추잡채", "팔보채", "딤섬", "훠궈", "마라탕", "마라샹궈", "동파육", "꿔바로우"),
        *("깐쇼새우", "울면", "북경오리", "난자완스"),
    ),
    "일식": (
        *("초밥", "라멘", "우동", "돈가스", "규동", "오코노미야키", "타코야키", "메밀소바"),
        *("텐동", "가츠동", "사시미", "샤부샤부", "스키야키", "나베", "오니기리", "장어덮밥"),
        *("낫토", "미소국", "야키소바", "연어덮밥"),
    ),
    "양식": (
        *("스파게티", "스테이크", "피자", "리소토", "라자냐", "햄버거", "오믈렛", "그라탱"),
        *("크림파스타", "봉골레파스타", "카르보나라", "시저샐러드", "양송이수프", "바비큐립"),
        *("감바스", "뇨키", "미트볼", "클램차우더", "피시앤칩스", "에그베네딕트"),
    ),
    "분식": (
        *("떡볶이", "순대", "김밥", "라볶이", "모둠튀김", "어묵", "쫄면", "참치김밥", "주먹밥"),
        *("핫도그", "컵밥", "치즈떡볶이", "로제떡볶이", "라면", "쫄볶이", "어묵탕", "김말이"),
        *("오징어튀김", "치즈라면", "떡꼬치"),
    ),
    "동남아 음식": (
        *("쌀국수", "팟타이", "똠얌꿍", "분짜", "반미", "나시고렝", "미고렝", "월남쌈"),
        *("그린커리", "쏨땀", "짜조", "반쎄오", "카오팟", "푸팟퐁커리", "락사", "사테"),
        *("치킨라이스", "카오만까이", "분보후에", "팟씨유"),
    ),
    "인도 음식": (
        *("탄두리치킨", "난", "버터치킨커리", "비리야니", "사모사", "팔락파니르", "라씨"),
        *("티카마살라", "빈달루", "달커리", "도사", "알루고비", "로간조시", "치킨코르마"),
        *("파코라", "라이타", "파니르커리"),
    ),
    "멕시코 음식": (
        *("타코", "부리토", "케사디야", "나초", "엔칠라다", "파히타", "과카몰리", "추로스"),
        *("칠리콘카르네", "타말레", "몰레", "포솔레", "토스타다", "칠라킬레스", "살사소스"),
    ),
}

# Other names of each cuisine: the first one stands in DISHES as the key.
NAMES: dict[str, tuple[str, ...]] = {
    "한식": ("한식", "한식", "한국 음식", "한국 요리", "우리나라 음식", "한정식"),
    "중식": ("중식", "중식", "중국 음식", "중국 요리", "중화요리"),
    "일식": ("일식", "일식", "일본 음식", "일본 요리"),
    "양식": ("양식", "양식", "서양 음식", "서양 요리", "서양식"),
    "분식": ("분식", "분식", "학교 앞 분식", "분식집 음식"),
    "동남아 음식": ("동남아 음식", "동남아 요리", "동남아시아 음식"),
    "인도 음식": ("인도 음식", "인도 요리"),
    "멕시코 음식": ("멕시코 음식", "멕시코 요리"),
}

# {을}, {이}, {은} are the particles that fit the cuisine's name {c}.
OPENINGS: tuple[str, ...] = (
    "나는 어렸을 때부터 {c}{을} 좋아했어.",
    "나는 어릴 때부터 {c}{을} 참 좋아했어.",
    "저는 어렸을 때부터 {c}{을} 좋아했어요.",
    "나는 {c}{을} 정말 좋아해.",
    "우리 가족은 모두 {c}{을} 좋아해.",
    "내 친구는 {c}만 먹어.",
    "요즘 {c}{이} 자꾸 생각나.",
    "오늘은 왠지 {c}{이} 먹고 싶어.",
    "오늘 점심은 {c}{으로} 정했어.",
    "주말마다 {c} 식당에 가.",
    "어머니는 {c}{을} 자주 만들어 주셨어.",
    "할머니는 평생 {c} 식당을 하셨어.",
    "동네에 새로 생긴 {c} 집이 아주 맛있어.",
    "{c}{은} 언제 먹어도 질리지 않아.",
    "세상에서 {c}{이} 제일 맛있어.",
    "여행을 가면 꼭 {c}{을} 먹어.",
    "나는 {c} 요리사가 되고 싶었어.",
    "회식은 늘 {c} 전문점에서 해.",
    "배가 고플 때는 {c}{이} 최고야.",
    "어제 {c} 맛집을 찾았어.",
    "요리 학원에서 {c}{을} 배우고 있어.",
    "남자친구는 {c}{이라면} 다 좋대.",
    "생일에는 {c}{을} 먹기로 했어.",
    "솔직히 다른 음식보다 {c}{이} 좋아.",
    "집에서 {c}{을} 해 먹는 게 취미야.",
    "비가 오는 날에는 {c}{이} 당겨.",
    "한동안 {c}{을} 못 먹어서 그리웠어.",
    "손님이 오면 {c}{을} 대접해.",
    "",
)
CLOSINGS: tuple[str, ...] = (
    "지금도 내가 가장 좋아하는 음식은",
    "그중에서도 가장 좋아하는 음식은",
    "그래서 오늘 저녁에 먹을 음식은",
    "제일 자주 먹는 메뉴는",
    "내가 꼭 시키는 메뉴는",
    "오늘 주문한 음식은",
    "가장 자신 있게 만드는 요리는",
    "친구에게 추천하고 싶은 음식은",
    "먹고 싶은 건",
    "지금 제일 생각나는 건",
    "언제나 고르는 건 역시",
    "우리가 함께 먹은 음식은",
    "그 집에서 제일 유명한 요리는",
    "다음에 먹어 볼 음식은 아마",
)
# Closings that name the cuisine themselves and need no opening.
WHOLE: tuple[str, ...] = (
    "내가 가장 좋아하는 {c}{은}",
    "가장 유명한 {c}{은}",
    "{c} 중에서 제일 맛있는 건",
    "{c} 하면 떠오르는 음식은",
    "대표적인 {c}{은}",
    "오늘 먹은 {c}{은}",
    "{c} 맛집에서 시킨 메뉴는",
    "처음 먹어 본 {c}{은}",
    "{c}{을} 좋아하는 사람에게 어울리는 메뉴는",
    "{c} 추천 메뉴는",
)
# Short questions whose answer is the bare dish.
SHORT: tuple[str, ...] = (
    "어떤 text를 추천? {c}",
    "어떤 음식을 추천? {c}",
    "어떤 메뉴를 추천? {c}",
    "어떤 요리를 추천해? {c}",
    "무엇을 추천? {c}",
    "오늘 메뉴 추천: {c}",
    "{c} 메뉴 하나만",
    "{c} 추천",
    "{c} 대표 메뉴",
    "좋아하는 {c}{은}?",
    "질문: {c} 하나만 골라 줘\n답:",
    "종류: {c}\n음식:",
)
# Small talk about food, in the form of the chat data.
ASKS: tuple[str, ...] = (
    "{c} 추천해줘",
    "{c} 뭐가 맛있어?",
    "{c} 먹고 싶어",
    "오늘 {c} 먹을까?",
    "{c} 중에 뭐 먹지?",
    "저녁에 {c} 어때?",
    "나는 {c}{이} 좋아",
    "점심에 {c} 먹으려고",
    "{c} 메뉴 골라줘",
    "맛있는 {c} 알려줘",
)
REPLIES: tuple[str, ...] = (
    "{d} 어때요?",
    "{d}{을} 드셔 보세요.",
    "{d}{을} 추천해요.",
    "오늘은 {d}{이} 좋겠어요.",
    "{d}{이} 맛있을 거예요.",
)
FACTS: tuple[str, ...] = (
    "{d}{은} 대표적인 {c} 메뉴다.",
    "{d}{은} 내가 좋아하는 {c} 메뉴야.",
    "{d}{은} {c} 식당에서 먹을 수 있어.",
    "{c} 식당에 가서 {d}{을} 먹었다.",
    "{c}{을} 먹으러 가서 {d}{을} 시켰다.",
)
ENDINGS: tuple[str, ...] = ("이야", "이야", "이에요", "입니다", "")
# Dishes of these two overlap (street food is Korean food too): never ranked against each other.
OVERLAP = ("한식", "분식")
# Kept out of training as a whole, to see whether new wording works.
UNSEEN_OPENINGS = (OPENINGS[4], OPENINGS[14], OPENINGS[22])
UNSEEN_CLOSINGS = (CLOSINGS[4], CLOSINGS[9])

SEED_QUERY = "나는 어렸을 때부터 한식을 좋아했어.\n지금도 내가 가장 좋아하는 음식은"
SEED_DOCUMENTS = ("된장찌개야", "스파게티야", "스테이크야", "짜장면이야")
SEED_SHORT_QUERY = "어떤 text를 추천? 한식"
SEED_SHORT_DOCUMENTS = ("된장찌개", "짜장면", "스파게티")


@dataclass(frozen=True)
class Sample:
    """A query, the cuisine it speaks of, and the ending that its documents carry."""

    query: str
    cuisine: str
    phrasing: str
    ending: str
    space: bool

    def document(self, dish: str) -> str:
        """The document that names `dish` in this sample's form."""
        return (" " if self.space else "") + with_ending(dish, self.ending)


def has_final(word: str) -> bool:
    """Whether the last Hangul syllable of `word` ends in a consonant."""
    code = ord(word[-1]) - 0xAC00
    return 0 <= code < 11172 and code % 28 != 0


def with_ending(dish: str, ending: str) -> str:
    """`dish` with the copula in the form that Korean spelling asks for after it."""
    if ending == "이야":
        return dish + ("이야" if has_final(dish) else "야")
    if ending == "이에요":
        return dish + ("이에요" if has_final(dish) else "예요")
    return dish + ending


def fill(text: str, key: str, word: str) -> str:
    """Puts `word` for `{key}` in `text`, each particle right after it in its fitting form."""
    final = has_final(word)
    rieul = (ord(word[-1]) - 0xAC00) % 28 == 8
    forms = {
        "{을}": "을" if final else "를",
        "{이}": "이" if final else "가",
        "{은}": "은" if final else "는",
        "{으로}": "으로" if final and not rieul else "로",
        "{이라면}": "이라면" if final else "라면",
    }
    for particle, form in forms.items():
        text = text.replace(f"{{{key}}}{particle}", word + form)
    return text.replace(f"{{{key}}}", word)


def is_heldout(phrasing: str, dish: str) -> bool:
    """Whether this pair stays out of training: 10% of all pairs, by hash."""
    digest = hashlib.sha256(f"{phrasing}|{dish}".encode()).digest()
    return digest[0] * 256 + digest[1] < 6554


def make_sample(rng: random.Random, cuisine: str, unseen: bool = False) -> Sample:
    """A random query for `cuisine`; `unseen` takes the wording kept out of training."""
    name = rng.choice(NAMES[cuisine])
    kind = 0.0 if unseen else rng.random()
    if kind < 0.65:
        opening, closing = pick_sentences(rng, unseen)
        text = rng.choice(("\n", " ")).join((opening, closing)) if opening else closing
        phrasing, ending = f"{opening}|{closing}", rng.choice(ENDINGS)
        text = text if opening else f"{name} 이야기야. {text}"
    elif kind < 0.85:
        phrasing, ending = rng.choice(WHOLE), rng.choice(ENDINGS)
        text = phrasing
    else:
        phrasing, ending = rng.choice(SHORT), ""
        text = phrasing
    return Sample(fill(text, "c", name), cuisine, phrasing, ending, rng.random() < 0.6)


def pick_sentences(rng: random.Random, unseen: bool) -> tuple[str, str]:
    """An opening and a closing, both seen in training or both kept out of it."""
    if unseen:
        return rng.choice(UNSEEN_OPENINGS), rng.choice(UNSEEN_CLOSINGS)
    opening = rng.choice([text for text in OPENINGS if text not in UNSEEN_OPENINGS])
    return opening, rng.choice([text for text in CLOSINGS if text not in UNSEEN_CLOSINGS])


def cuisines_to_rank(rng: random.Random) -> list[str]:
    """The cuisines of one ranking group, without one of the two that overlap."""
    dropped = rng.choice(OVERLAP)
    return [cuisine for cuisine in DISHES if cuisine != dropped]


def pick_dish(rng: random.Random, cuisine: str, phrasing: str, heldout: bool) -> str:
    """A dish of `cuisine` whose pair with `phrasing` is (not) held out; any if there is none."""
    pool = [dish for dish in DISHES[cuisine] if is_heldout(phrasing, dish) == heldout]
    return rng.choice(pool or DISHES[cuisine])


def make_group(rng: random.Random, per_cuisine: int) -> tuple[list[str], list[str], list[int]]:
    """Training queries, one document per cuisine, and the index of each query's document.

    All documents of a group have one form, so that only the dish decides.  Held-out pairs of
    phrasing and dish never meet in a group: the query is drawn again instead.
    """
    cuisines = cuisines_to_rank(rng)
    form = make_sample(rng, cuisines[0])
    dishes = [rng.choice(DISHES[cuisine]) for cuisine in cuisines]
    queries: list[str] = []
    targets: list[int] = []
    for index, cuisine in enumerate(cuisines):
        for _ in range(per_cuisine):
            sample = make_sample(rng, cuisine)
            while is_heldout(sample.phrasing, dishes[index]):
                sample = make_sample(rng, cuisine)
            queries.append(sample.query)
            targets.append(index)
    return queries, [form.document(dish) for dish in dishes], targets


def make_test(rng: random.Random, unseen: bool, candidates: int = 4) -> tuple[str, list[str]]:
    """A held-out query and its documents, the fitting one first, the rest of other cuisines."""
    cuisines = rng.sample(cuisines_to_rank(rng), candidates)
    sample = make_sample(rng, cuisines[0], unseen)
    while not unseen and not any(is_heldout(sample.phrasing, dish) for dish in DISHES[cuisines[0]]):
        sample = make_sample(rng, cuisines[0])
    dishes = [pick_dish(rng, cuisines[0], sample.phrasing, heldout=not unseen)]
    dishes += [rng.choice(DISHES[cuisine]) for cuisine in cuisines[1:]]
    return sample.query, [sample.document(dish) for dish in dishes]


def make_turn(rng: random.Random) -> tuple[str, str]:
    """A question about a cuisine and an answer that names a dish of it."""
    cuisine = rng.choice(list(DISHES))
    ask, reply = rng.choice(ASKS), rng.choice(REPLIES)
    dish = pick_dish(rng, cuisine, ask, heldout=False)
    return fill(ask, "c", rng.choice(NAMES[cuisine])), fill(reply, "d", dish)


def make_fact(rng: random.Random) -> str:
    """A sentence that says which cuisine a dish belongs to."""
    cuisine = rng.choice(list(DISHES))
    text = fill(rng.choice(FACTS), "c", rng.choice(NAMES[cuisine]))
    return fill(text, "d", rng.choice(DISHES[cuisine]))
