{{/* What pods have in common. A part is a component's values merged with `podDefaults`. */}}

{{/* Of (list root values): the part of a component, as JSON. */}}
{{- define "moiety.part" -}}
{{- $root := index . 0 -}}
{{- include "moiety.withoutNulls" (mergeOverwrite (deepCopy $root.Values.podDefaults) (deepCopy (index . 1))) -}}
{{- end -}}

{{/* Of a part: the same as JSON, without entries of its maps that a component has set to null to remove them. */}}
{{- define "moiety.withoutNulls" -}}
{{- $part := . -}}
{{- range $name := list "podLabels" "podAnnotations" "nodeSelector" "affinity" "updateStrategy" -}}
{{- range $key, $value := get $part $name | default dict -}}
{{- if kindIs "invalid" $value }}{{ $_ := unset (get $part $name) $key }}{{ end -}}
{{- end -}}
{{- end -}}
{{- toJson $part -}}
{{- end -}}

{{/* Of (list defaults given): the merged map as YAML, without entries that are null. */}}
{{- define "moiety.merged" -}}
{{- $merged := mergeOverwrite (index . 0) (deepCopy (index . 1)) -}}
{{- range $name, $value := $merged }}{{ if kindIs "invalid" $value }}{{ $_ := unset $merged $name }}{{ end }}{{ end -}}
{{- toYaml $merged -}}
{{- end -}}

{{/* Of (list part component): the security context of a pod, with the user of its image. */}}
{{- define "moiety.podSecurity" -}}
{{- $part := index . 0 -}}
{{- $user := 10001 -}}
{{- if eq (index . 1) "database" }}{{ $user = 999 }}{{ end -}}
{{- $fields := dict "runAsNonRoot" true "fsGroupChangePolicy" "OnRootMismatch" "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- if $part.fixedUser }}{{ $_ := merge $fields (dict "runAsUser" $user "runAsGroup" $user "fsGroup" $user) }}{{ end -}}
{{- include "moiety.merged" (list $fields $part.podSecurityContext) -}}
{{- end -}}

{{- define "moiety.containerSecurity" -}}
{{- $fields := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true "capabilities" (dict "drop" (list "ALL")) -}}
{{- include "moiety.merged" (list $fields .containerSecurityContext) -}}
{{- end -}}

{{/* Of (list root part image): where a container comes from, with its rights. */}}
{{- define "moiety.from" -}}
{{- $root := index . 0 -}}
{{- $part := index . 1 -}}
image: {{ $part.image | default (include "moiety.image" (list $root (index . 2))) | quote }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
securityContext:
  {{- include "moiety.containerSecurity" $part | nindent 2 }}
{{- end -}}

{{/* The directory in which a container starts. That of the images belongs to their user, and a user that the cluster
chooses cannot enter it. */}}
{{- define "moiety.workingDirectory" -}}
workingDir: /tmp
{{- end -}}

{{/* Of (list root part): the same for the gateway's image, which also runs the trace store, the Jobs and the containers
that prepare a pod. */}}
{{- define "moiety.fromGateway" -}}
{{- $root := index . 0 -}}
{{- $part := set (deepCopy (index . 1)) "image" ((index . 1).image | default $root.Values.gateway.image) -}}
{{- include "moiety.from" (list $root $part "gateway") }}
{{ include "moiety.workingDirectory" . -}}
{{- end -}}

{{- define "moiety.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Of (list root part component): the labels of a component's pods. */}}
{{- define "moiety.podLabels" -}}
{{- $labels := include "moiety.labels" (list (index . 0) (index . 2)) | fromYaml -}}
{{- toYaml (merge $labels ((index . 1).podLabels)) -}}
{{- end -}}

{{/* Of (list root part component): the fields of a pod's specification that all components have. */}}
{{- define "moiety.pod" -}}
{{- $root := index . 0 -}}
{{- $part := index . 1 -}}
enableServiceLinks: false
{{- include "moiety.pullSecrets" $root }}
{{- with $part.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
securityContext:
  {{- include "moiety.podSecurity" (list $part (index . 2)) | nindent 2 }}
{{- include "moiety.placement" (list $root $part (index . 2)) }}
{{- end -}}

{{/* Of (list root part component): where pods may run. */}}
{{- define "moiety.placement" -}}
{{- $part := index . 1 -}}
{{- $selector := dict "matchLabels" (include "moiety.selector" (list (index . 0) (index . 2)) | fromYaml) -}}
{{- with $part.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  - {{- toYaml (merge (deepCopy .) (dict "labelSelector" $selector)) | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Of (list part containers): the containers that start before the main one: native sidecars, then those that prepare
the pod (YAML, or empty). A native sidecar is an init container that is restarted until the others have ended. */}}
{{- define "moiety.initContainers" -}}
{{- $sidecars := (index . 0).sidecars -}}
{{- $containers := index . 1 | trim -}}
{{- if or $sidecars $containers }}
initContainers:
  {{- range $sidecars }}
  - {{- toYaml (merge (dict "restartPolicy" "Always") .) | nindent 4 }}
  {{- end }}
  {{- with $containers }}
  {{- . | nindent 2 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Additional variables, sources of variables, mounts and volumes of a part; each renders a list or nothing. */}}
{{- define "moiety.extraEnv" -}}
{{- with .extraEnv }}
{{- toYaml . }}
{{- end }}
{{- end -}}

{{- define "moiety.envFrom" -}}
{{- with .envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "moiety.extraMounts" -}}
{{- with .extraVolumeMounts }}
{{- toYaml . }}
{{- end }}
{{- end -}}

{{- define "moiety.extraVolumes" -}}
{{- with .extraVolumes }}
{{- toYaml . }}
{{- end }}
{{- end -}}

{{/* Of (list probes handler): the probes of a container, which all ask the same handler. */}}
{{- define "moiety.probes" -}}
{{- $handler := index . 1 -}}
{{- range $name, $terms := index . 0 }}
{{ $name }}Probe:
  {{- toYaml (merge (deepCopy $handler) $terms) | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Of (list root entry [variable]): an environment variable from the Secret of the deployment. */}}
{{- define "moiety.fromSecret" -}}
{{- $root := index . 0 -}}
name: {{ index . 2 }}
valueFrom:
  secretKeyRef:
    name: {{ include "moiety.secret" $root }}
    key: {{ index . 1 }}
{{- end -}}

{{/* An entry that need not be there. */}}
{{- define "moiety.fromSecretIfThere" -}}
{{ include "moiety.fromSecret" . }}
    optional: true
{{- end -}}

{{- define "moiety.databaseVariable" -}}
{{- if .Values.database.bundled.enabled -}}
{{- include "moiety.fromSecret" (list . "database-url" "MOIETY_DATABASE_URL") -}}
{{- else -}}
name: MOIETY_DATABASE_URL
valueFrom:
  secretKeyRef:
    name: {{ .Values.database.existingSecret }}
    key: {{ .Values.database.existingSecretKey }}
{{- end -}}
{{- end -}}

{{/* Of (list root part): waits for the database and brings the bundled one up to date, which no hook can do before it is
installed. */}}
{{- define "moiety.migrateFirst" -}}
{{- $root := index . 0 -}}
{{- $part := index . 1 -}}
{{- if $root.Values.database.bundled.enabled }}
- name: migrate
  {{- include "moiety.fromGateway" (list $root $part) | nindent 2 }}
  args: [migrate, upgrade, --wait-s, {{ $root.Values.jobs.migrateSeconds | quote }}]
  env:
    - {{- include "moiety.databaseVariable" $root | nindent 6 }}
    {{- include "moiety.extraEnv" $part | nindent 4 }}
  {{- include "moiety.envFrom" $part | nindent 2 }}
  resources:
    {{- toYaml $root.Values.jobs.resources | nindent 4 }}
  volumeMounts:
    - {name: scratch, mountPath: /tmp}
{{- end }}
{{- end -}}
